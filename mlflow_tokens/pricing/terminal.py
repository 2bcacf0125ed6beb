"""The command `mlflow-tokens prices`: the prices that a run can name, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mlflow_tokens.pricing.listing import ListedPrice, listed_prices
from mlflow_tokens.pricing.price_file import VARIABLE


def show_prices(contains: str, as_json: bool, environ: Mapping[str, str], console: Console) -> None:
    """List the prices whose name, price, product or region contains a text.

    Raises:
        ValueError: the price file cannot be used.
    """
    lines = listed_prices(environ, contains)
    if as_json:
        text = json.dumps({"prices": [asdict(line) for line in lines]}, ensure_ascii=False, indent=2)
        # Whole, whatever the width of the terminal.
        console.file.write(text + "\n")
        return
    if not lines:
        console.print(f"No price contains {escape(repr(contains))}. All are listed without it.")
        return
    sources = list(dict.fromkeys(_source(line) for line in lines))
    console.print(_table(lines, sources))
    for number, source in enumerate(sources, start=1):
        console.print(escape(f"({number}) {source}"), highlight=False, soft_wrap=True)
    _print_notes(lines, console)
    if not environ.get(VARIABLE):
        console.print(f"Prices of your own: name them in a TOML file and set ${VARIABLE} to its path.")


def _source(line: ListedPrice) -> str:
    return line.page or line.source


def _table(lines: Sequence[ListedPrice], sources: Sequence[str]) -> Table:
    table = Table(header_style="bold")
    # What a script must say is never cut.
    table.add_column("name", no_wrap=True)
    table.add_column("price", overflow="fold")
    table.add_column("date", no_wrap=True)
    table.add_column("source", no_wrap=True)
    for line in lines:
        name = f"[bold]{escape(line.name)}[/]" if line.origin == "file" else escape(line.name)
        star = " *" if line.default else ""
        old = " !" if line.warning else ""
        source = f"({sources.index(_source(line)) + 1})"
        table.add_row(name + star, escape(line.price), (line.date or "–") + old, source)
    return table


def _print_notes(lines: Sequence[ListedPrice], console: Console) -> None:
    for line in lines:
        for moment, price in line.changes:
            console.print(escape(f"{line.name}: from {moment} {price}"), highlight=False)
    for line in lines:
        if line.warning:
            console.print(escape(f"! {line.name}: {line.warning}"), highlight=False)
    if any(line.default for line in lines):
        console.print("* used where no price is stated")
