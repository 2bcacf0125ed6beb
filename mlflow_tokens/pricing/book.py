"""The built-in price book: public list prices, each with its source and its date.

A row is named provider/accelerator, as in "aws/h100-80gb", and where that leaves several, by its region or
kind, too: "runpod/h100-80gb/secure-cloud". Figures are those of `book.json`, which says where each is from.
"""

from __future__ import annotations

import datetime
import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib import resources

from mlflow_tokens.pricing.price import Price

#: From this age on a list price is used with a warning.
OLD = datetime.timedelta(days=180)

_NAME = re.compile(r"[a-z][\w.-]*(/[\w.-]+)+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class BookRow:
    """A list price. product: what the provider calls it. page: the provider's public page of its prices.

    via: the public record that the figure was read in.
    """

    provider: str
    accelerator: str
    product: str
    region: str
    price: Price
    page: str
    via: str

    @property
    def base(self) -> str:
        """The shortest name that may mean this row."""
        return f"{self.provider}/{self.accelerator}"

    def is_meant_by(self, name: str) -> bool:
        """Whether this name means this row, perhaps among others."""
        parts = name.strip().lower().split("/")
        rest = {self.region, self.price.kind}
        return "/".join(parts[:2]) == self.base and all(part in rest for part in parts[2:])


@cache
def price_book() -> tuple[BookRow, ...]:
    """All rows of the book, in the order of the file."""
    text = resources.files("mlflow_tokens.pricing").joinpath("book.json").read_text("utf-8")
    return tuple(_row(values) for values in json.loads(text)["rows"])


def is_book_name(text: str) -> bool:
    """Whether this has the form of a name in the book."""
    return _NAME.fullmatch(text.strip()) is not None


def name_of(row: BookRow, rows: Sequence[BookRow]) -> str:
    """The shortest name that means this row alone."""
    names = (row.base, f"{row.base}/{row.region}", f"{row.base}/{row.price.kind}")
    alone = (name for name in names if sum(other.is_meant_by(name) for other in rows) == 1)
    return next(alone, f"{row.base}/{row.region}/{row.price.kind}")


def find_row(name: str, rows: Sequence[BookRow]) -> BookRow:
    """The row of this name.

    Raises:
        ValueError: there is none, or there are several; the message lists names that can be used.
    """
    meant = [row for row in rows if row.is_meant_by(name)]
    if len(meant) == 1:
        return meant[0]
    if meant:
        names = [name_of(row, rows) for row in meant]
        raise ValueError(f"price={name!r} is several rows of the price book; say which: {_quoted(names)}")
    names = [name_of(row, rows) for row in rows]
    close = difflib.get_close_matches(name.strip().lower(), names, 5, 0.5)
    likely = f"; close to it: {_quoted(close)}" if close else ""
    raise ValueError(
        f"price={name!r} is no row of the price book{likely}. `mlflow-tokens prices` lists all; what is not "
        "listed can be stated, as in price='2.0 USD/device-hour'"
    )


def age_warning(date: datetime.date | None, today: datetime.date) -> str | None:
    """What to say about a list price of this day; None while it is young enough."""
    if date is None or today - date <= OLD:
        return None
    return f"{(today - date).days} days old, of {date.isoformat()}: check it"


def _row(values: dict[str, str | int | None]) -> BookRow:
    names = ("provider", "accelerator", "product", "region", "source", "via")
    provider, accelerator, product, region, page, via = (str(values[name]) for name in names)
    price = Price(
        Decimal(str(values["amount"])),
        str(values["currency"]),
        values["unit"],  # type: ignore[arg-type]
        values["devices"],  # type: ignore[arg-type]
        values["kind"],  # type: ignore[arg-type]
        f"price book: {provider} {product}, {region}, {page}",
        datetime.date.fromisoformat(str(values["date"])),
    )
    return BookRow(provider, accelerator, product, region, price, page, via)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
