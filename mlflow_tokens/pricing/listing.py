"""All prices that a run can name: those of the team's file, and the book's that it does not replace."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mlflow_tokens.pricing.book import BookRow, age_warning, name_of, price_book
from mlflow_tokens.pricing.price import Price
from mlflow_tokens.pricing.price_file import VARIABLE, NamedPrice, read_price_file


@dataclass(frozen=True, slots=True)
class ListedPrice:
    """A price by its name, as plain data.

    price: as text; amount: the same figure, exact, as text. origin: "book" or "file". changes: (moment in
    UTC, price) as text. page, via: of a row of the book, the provider's page and the public record it was
    read in. warning: of its age.
    """

    name: str
    price: str
    amount: str
    currency: str
    unit: str
    devices: int | None
    kind: str | None
    date: str | None
    source: str
    origin: str
    warning: str | None = None
    default: bool = False
    changes: tuple[tuple[str, str], ...] = ()
    product: str | None = None
    region: str | None = None
    page: str | None = None
    via: str | None = None


def listed_prices(
    environ: Mapping[str, str], contains: str = "", today: datetime.date | None = None
) -> list[ListedPrice]:
    """The prices of the file first, then those of the book; contains: in name, price, product or region.

    Raises:
        ValueError: the price file cannot be used.
    """
    today = today or datetime.date.today()
    file = read_price_file(Path(environ[VARIABLE])) if environ.get(VARIABLE) else None
    own = file.prices if file is not None else {}
    lines = [_of_file(named, today) for named in own.values()]
    rows = price_book()
    lines += [line for row in rows if (line := _of_book(row, name_of(row, rows), today)).name not in own]
    wanted = contains.strip().lower()
    return [line for line in lines if wanted in _searched(line)]


def _of_file(named: NamedPrice, today: datetime.date) -> ListedPrice:
    changes = tuple((_moment(change.t_wall), str(change.price)) for change in named.changes)
    # What was paid for hardware does not grow old; a rent does.
    warning = None if named.price.kind == "owned" else age_warning(named.price.date, today)
    line = _line(named.name, named.price, "file", warning)
    return replace(line, default=named.is_default, changes=changes)


def _of_book(row: BookRow, name: str, today: datetime.date) -> ListedPrice:
    line = _line(name, row.price, "book", age_warning(row.price.date, today))
    return replace(line, product=row.product, region=row.region, page=row.page, via=row.via)


def _line(name: str, price: Price, origin: str, warning: str | None) -> ListedPrice:
    return ListedPrice(
        name=name,
        price=str(price),
        amount=str(price.amount),
        currency=price.currency,
        unit=price.unit,
        devices=price.devices_per_instance,
        kind=price.kind,
        date=price.date.isoformat() if price.date else None,
        source=price.source,
        origin=origin,
        warning=warning,
    )


def _moment(t_wall: float) -> str:
    return datetime.datetime.fromtimestamp(t_wall, datetime.timezone.utc).isoformat()


def _searched(line: ListedPrice) -> str:
    return " ".join((line.name, line.price, line.product or "", line.region or "")).lower()
