"""Which price a run is billed at: what the user states, by name or in full, or the price file's default."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlflow_tokens.pricing.price import Price, parse_price
from mlflow_tokens.pricing.price_file import VARIABLE, Change, NamedPrice, PriceFile, read_price_file


@dataclass(frozen=True, slots=True)
class PriceChoice:
    """The price of a run, and how it changes. price: None if there is none, so that cost is unknown."""

    price: Price | None
    changes: tuple[Change, ...] = ()

    def at(self, t_wall: float) -> Price | None:
        """The price at a time of day in s since the epoch."""
        past = [change.price for change in self.changes if change.t_wall <= t_wall]
        return past[-1] if past else self.price


def choose_price(stated: str | Price | None, environ: Mapping[str, str]) -> PriceChoice:
    """The price that is stated: in full, or by its name in the price file; else the file's default.

    Raises:
        ValueError: it is no price and no name, or the price file cannot be used.
    """
    file = read_price_file(Path(environ[VARIABLE])) if environ.get(VARIABLE) else None
    if stated is None:
        default = file.default if file else None
        return _choice(default) if default else PriceChoice(None)
    if isinstance(stated, str) and file is not None and stated.strip() in file.prices:
        return _choice(file.prices[stated.strip()])
    try:
        return PriceChoice(parse_price(stated))
    except ValueError as error:
        raise ValueError(f"{error}{_names(str(stated), file)}") from None


def _choice(named: NamedPrice) -> PriceChoice:
    return PriceChoice(named.price, named.changes)


def _names(stated: str, file: PriceFile | None) -> str:
    if file is None:
        return f"; or a name out of the price file that ${VARIABLE} names"
    close = difflib.get_close_matches(stated.strip(), file.prices, 3, 0.4) or list(file.prices)[:5]
    return f"; or a name out of {file.path}, such as {', '.join(map(repr, close))}" if close else ""
