"""Which price a run is billed at: what the user states, in full or by name, or the price file's default."""

from __future__ import annotations

import datetime
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mlflow_tokens.pricing.book import age_warning, find_row, is_book_name, name_of, price_book
from mlflow_tokens.pricing.electricity import Electricity
from mlflow_tokens.pricing.price import Price, parse_price
from mlflow_tokens.pricing.price_file import VARIABLE, Change, NamedPrice, PriceFile, read_price_file


@dataclass(frozen=True, slots=True)
class PriceChoice:
    """The price of a run, and how it changes.

    price: None if there is none, so that cost is unknown. electricity: of owned hardware. notices: what the
    user should know about the price.
    """

    price: Price | None
    changes: tuple[Change, ...] = ()
    electricity: Electricity | None = None
    notices: tuple[str, ...] = ()

    def at(self, t_wall: float) -> Price | None:
        """The price at a time of day in s since the epoch."""
        past = [change.price for change in self.changes if change.t_wall <= t_wall]
        return past[-1] if past else self.price


def choose_price(
    stated: str | os.PathLike[str] | Price | None,
    environ: Mapping[str, str],
    today: datetime.date | None = None,
) -> PriceChoice:
    """The price that is stated: in full, or by its name in the price file or book; else the file's default.

    A price file of which the path is stated is read in the place of the one in the environment, for its
    default. A name in the file goes before the same name in the book.

    Raises:
        ValueError: it is no price and no name, or the price file cannot be used.
    """
    today = today or datetime.date.today()
    if isinstance(stated, os.PathLike) or (isinstance(stated, str) and stated.strip().endswith(".toml")):
        file = read_price_file(Path(stated.strip() if isinstance(stated, str) else stated))
        if file.default is None:
            names = ", ".join(map(repr, file.prices)) or "none"
            raise ValueError(
                f"the price file {file.path} has no price with default = true (it has {names}); mark one, "
                f"or set ${VARIABLE} to the file and state a name"
            )
        return _with_electricity(_named(file.default), file)
    if not environ.get(VARIABLE):
        return _chosen(stated, None, today)
    file = read_price_file(Path(environ[VARIABLE]))
    return _with_electricity(_chosen(stated, file, today), file)


def _chosen(stated: str | Price | None, file: PriceFile | None, today: datetime.date) -> PriceChoice:
    if stated is None:
        return _named(file.default) if file is not None and file.default else PriceChoice(None)
    name = stated.strip() if isinstance(stated, str) else None
    if name is not None and file is not None and name in file.prices:
        return _named(file.prices[name])
    notices: tuple[str, ...] = ()
    try:
        price = parse_price(stated, today)
    except ValueError as error:
        if name is None or not is_book_name(name):
            raise ValueError(f"{error}{_names(str(stated), file)}{_in_the_book(name)}") from None
        try:
            price = find_row(name, price_book()).price
        except ValueError as unknown:
            raise ValueError(f"{unknown}{_names(name, file) if file is not None else ''}") from None
        warning = age_warning(price.date, today)
        notices = (f"The price {name} of the price book is {warning}.",) if warning else ()
    assert price is not None
    return PriceChoice(file.rates.convert(price) if file is not None else price, (), None, notices)


def _named(named: NamedPrice) -> PriceChoice:
    return PriceChoice(named.price, named.changes)


def _with_electricity(choice: PriceChoice, file: PriceFile) -> PriceChoice:
    electricity = file.electricity
    if electricity is None or choice.price is None:
        return choice
    rented = [price for price in (choice.price, *(c.price for c in choice.changes)) if price.kind != "owned"]
    if rented:
        raise ValueError(
            f"the price file {file.path}: [electricity] cannot go with the price {rented[0]}, since rent "
            "contains it: use an owned price ([owned.NAME], or the word owned in its text), or keep "
            "[electricity] in another file"
        )
    if electricity.currency != choice.price.currency:
        raise ValueError(
            f"the price file {file.path}: [electricity] is in {electricity.currency} and the price in "
            f"{choice.price.currency}: name one as `currency` and give the rate of the other in [rates]"
        )
    notice = "Electricity is not charged yet, since energy is not measured: cost is of the devices alone."
    return replace(choice, electricity=electricity, notices=(*choice.notices, notice))


def _names(stated: str, file: PriceFile | None) -> str:
    if file is None:
        return f"; or a name out of the price file that ${VARIABLE} names"
    close = difflib.get_close_matches(stated.strip(), file.prices, 3, 0.4) or list(file.prices)[:5]
    return f"; or a name out of {file.path}, such as {', '.join(map(repr, close))}" if close else ""


def _in_the_book(name: str | None) -> str:
    """The rows that somebody may mean who names an accelerator alone."""
    if not name:
        return ""
    rows = price_book()
    names = [found for row in rows if name.lower() in (found := name_of(row, rows))][:3]
    return f"; or a name out of the price book, such as {', '.join(map(repr, names))}" if names else ""
