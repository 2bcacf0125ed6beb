"""The ranking as a table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mlflow_tokens.compare.table import RankedRun

#: Narrower than this the table leaves out its less important columns.
_WIDE = 120


def print_ranking(lines: Sequence[RankedRun], by: str, console: Console) -> None:
    """Print one table a group, so that what may not be ranked together is seen apart."""
    groups = [(group, list(members)) for group, members in groupby(lines, key=lambda line: line.group)]
    for group, members in groups:
        console.print(_table(members, by, group if len(groups) > 1 else None, console.width >= _WIDE))
    missing = sum(line.rank is None for line in lines)
    if missing:
        console.print(
            f"{missing} of {len(lines)} runs have no rank: their cost or their {by} tokens are unknown."
        )


def _table(lines: Sequence[RankedRun], by: str, group: str | None, wide: bool) -> Table:
    currency = lines[0].currency or ""
    table = Table(title=group and escape(group), title_justify="left", header_style="bold")
    table.add_column("#", justify="right")
    table.add_column("run", overflow="fold")
    table.add_column(f"{currency} / 1M {by} tokens".strip(), justify="right", style="bold")
    for heading in ("total cost", "computed", "valid", "valid %", "tokens/s", "device-h"):
        table.add_column(heading, justify="right")
    if wide:
        table.add_column("tokens/s/device", justify="right")
        table.add_column("devices")
        table.add_column("price")
        table.add_column("status")
    for line in lines:
        cells = [
            str(line.rank or "–"),
            escape(line.run_name),
            _figure(line.cost_per_million),
            f"{_figure(line.cost_total)} {currency}" if line.cost_total is not None else "–",
            _count(line.tokens_computed),
            _count(line.tokens_valid),
            f"{line.valid_ratio:.1%}" if line.valid_ratio is not None else "–",
            _figure(line.tokens_per_second),
            _figure(line.device_hours),
        ]
        if wide:
            cells += [
                _figure(line.tokens_per_second_per_device),
                line.devices or "–",
                line.price or "–",
                line.status,
            ]
        table.add_row(*cells)
    return table


def _figure(value: float | None) -> str:
    """Four significant digits; thousands are grouped."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
