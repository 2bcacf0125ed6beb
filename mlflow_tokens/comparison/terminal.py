"""The ranking as a table in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mlflow_tokens.comparison.table import RankedRun

#: From this width on the table has room for the less important columns.
_MEDIUM, _WIDE = 100, 140


def print_ranking(lines: Sequence[RankedRun], by: str, console: Console) -> None:
    """Print one table a group, so that what may not be ranked together is seen apart."""
    groups = [(group, list(members)) for group, members in groupby(lines, key=lambda line: line.group)]
    for group, members in groups:
        console.print(_table(members, by, group if len(groups) > 1 else None, console.width))
    for line in lines:
        if line.corrected_by:
            console.print(escape(_correction(line)))
    missing = sum(line.rank is None for line in lines)
    if missing:
        console.print(
            f"{missing} of {len(lines)} runs have no rank: their cost or their {by} tokens are unknown."
        )


def _table(lines: Sequence[RankedRun], by: str, group: str | None, width: int) -> Table:
    currency = lines[0].currency or "cost"
    table = Table(title=group and escape(group), title_justify="left", header_style="bold")
    table.add_column("#", justify="right")
    table.add_column("run", overflow="fold", min_width=8)
    # Figures are never cut: a narrow terminal gets fewer columns.
    for column in _columns(currency, by, width):
        table.add_column(column.heading, justify="right", no_wrap=True)
    for line in lines:
        cells = [column.cell(line) for column in _columns(currency, by, width)]
        table.add_row(str(line.rank or "–"), escape(line.run_name), *cells)
    return table


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    cell: Callable[[RankedRun], str]
    from_width: int = 0


def _columns(currency: str, by: str, width: int) -> list[_Column]:
    columns = [
        _Column(f"{currency} / 1M\n{by} tokens", lambda line: f"[bold]{_figure(line.cost_per_million)}[/]"),
        _Column(f"total\n{currency}", _total),
        _Column("computed\ntokens", lambda line: _count(line.tokens_computed), _MEDIUM),
        _Column("valid\ntokens", lambda line: _count(line.tokens_valid)),
        _Column("valid", lambda line: "–" if line.valid_ratio is None else f"{line.valid_ratio:.1%}"),
        _Column("tokens/s", lambda line: _figure(line.tokens_per_second)),
        _Column("tokens/s\n/device", lambda line: _figure(line.tokens_per_second_per_device), _WIDE),
        _Column("device\nhours", lambda line: _figure(line.device_hours), _MEDIUM),
        _Column("devices", lambda line: escape(line.devices or "–"), _WIDE),
        _Column("price", lambda line: escape(line.price or "–"), _WIDE),
        _Column("status", lambda line: line.status, _MEDIUM),
    ]
    return [column for column in columns if width >= column.from_width]


def _total(line: RankedRun) -> str:
    return _figure(line.cost_total) + ("*" if line.corrected_by else "")


def _correction(line: RankedRun) -> str:
    logged = "no cost" if line.cost_logged is None else f"{_figure(line.cost_logged)} {line.currency}"
    note = f": {line.correction_note}" if line.correction_note else ""
    day = (line.corrected_at or "")[:10]
    return f"* {line.run_name}: by invoice, {line.corrected_by}, {day}{note}; {logged} was logged"


def _figure(value: float | None) -> str:
    """Four significant digits; thousands are grouped."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
