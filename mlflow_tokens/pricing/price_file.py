"""A team's prices in a TOML file: named, dated, with what changes during a run, and owned hardware."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, TypeVar

from mlflow_tokens.pricing.price import Price, parse_price

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

#: Names the file.
VARIABLE = "MLFLOW_TOKENS_PRICES"

HOURS_PER_YEAR = 8760

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Change:
    """From this moment on (s since the epoch) the devices cost this much."""

    t_wall: float
    price: Price


@dataclass(frozen=True, slots=True)
class NamedPrice:
    """A price of the file, and the changes of it that are known beforehand, in the order of their time."""

    name: str
    price: Price
    changes: tuple[Change, ...] = ()
    is_default: bool = False


@dataclass(frozen=True, slots=True)
class PriceFile:
    """What a price file holds. currency: that all prices are converted to, if it says so."""

    path: Path
    prices: Mapping[str, NamedPrice]

    @property
    def default(self) -> NamedPrice | None:
        """The price that is used where none is stated."""
        return next((named for named in self.prices.values() if named.is_default), None)


def read_price_file(path: Path) -> PriceFile:
    """Read and check a price file.

    Raises:
        ValueError: it cannot be read, or something in it cannot be used; the message says where.
    """
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"the price file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the price file {path} is not TOML: {error}") from None
    top = _Table(path, "", content)
    convert = _conversion(top)
    prices: dict[str, NamedPrice] = {}
    for name, table in top.tables("prices").items():
        prices[name] = _named(name, table, convert)
    for name, table in top.tables("owned").items():
        if name in prices:
            raise table.error(None, "there is a price of this name, too")
        prices[name] = _owned(name, table, convert)
    top.done()
    if sum(named.is_default for named in prices.values()) > 1:
        raise ValueError(f"the price file {path} has several prices with default = true")
    return PriceFile(path, prices)


class _Table:
    """One table of the file, of which every field must be asked for."""

    def __init__(self, path: Path, name: str, values: Mapping[str, Any]) -> None:
        self._path, self._name, self._values = path, name, dict(values)

    def error(self, field: str | None, reason: str) -> ValueError:
        where = f"[{self._name}] " if self._name else ""
        return ValueError(f"the price file {self._path}: {where}{f'{field}: ' if field else ''}{reason}")

    def take(self, field: str, kind: type[T] | tuple[type[T], ...], what: str, default: Any = ...) -> Any:
        if field not in self._values:
            if default is ...:
                raise self.error(field, f"is missing; it must be {what}")
            return default
        value = self._values.pop(field)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(field, f"{value!r} must be {what}")
        return value

    def number(self, field: str, what: str, default: Any = ...) -> Any:
        """A Decimal above 0; of a float of the file, what was written."""
        value = self.take(field, (str, int, float), what, default)
        if value is default:
            return value
        try:
            number = Decimal(str(value))
        except InvalidOperation:
            number = Decimal("nan")
        if not number.is_finite() or number <= 0:
            raise self.error(field, f"{value!r} must be {what}, above 0")
        return number

    def date(self) -> datetime.date | None:
        value = self.take("date", datetime.date, "a date, as in 2026-11-30", None)
        if isinstance(value, datetime.datetime):
            raise self.error("date", f"{value!r} must be a date without a time, as in 2026-11-30")
        date: datetime.date | None = value
        return date

    def tables(self, field: str) -> dict[str, _Table]:
        values = self.take(field, dict, "a table of tables", {})
        for name, value in values.items():
            if not isinstance(value, dict):
                raise self.error(f"{field}.{name}", f"{value!r} must be a table")
        return {name: _Table(self._path, f"{field}.{name}", value) for name, value in values.items()}

    def done(self) -> None:
        if self._values:
            raise self.error(None, f"unknown: {', '.join(sorted(self._values))}")


def _named(name: str, table: _Table, convert: Callable[[_Table, Price], Price]) -> NamedPrice:
    price = _price(table)
    is_default = table.take("default", bool, "true or false", False)
    changes: list[Change] = []
    for number, values in enumerate(table.take("schedule", list, "an array of tables", [])):
        if not isinstance(values, dict):
            raise table.error("schedule", f"{values!r} must be a table with `from` and `price`")
        entry = _Table(table._path, f"{table._name}.schedule {number + 1}", values)
        begin = entry.take("from", datetime.datetime, "a moment, as in 2026-12-01T10:00:00+08:00")
        if begin.tzinfo is None:
            raise entry.error("from", f"{begin.isoformat()} must have a time zone, as in …T10:00:00+08:00")
        changed = _price(entry)
        entry.done()
        if changes and begin.timestamp() <= changes[-1].t_wall:
            raise entry.error("from", "must be later than the entry before")
        if changed.currency != price.currency:
            raise entry.error("price", f"{changed} is in another currency than {price}")
        changes.append(Change(begin.timestamp(), convert(entry, changed)))
    table.done()
    return NamedPrice(name, convert(table, price), tuple(changes), is_default)


def _price(table: _Table) -> Price:
    text = table.take("price", str, 'a price, as in "2.0 USD/device-hour spot"')
    source = table.take("source", str, "text: who says so", f"price file {table._path}")
    date = table.date()
    try:
        price = parse_price(text)
    except ValueError as error:
        raise table.error("price", str(error)) from None
    assert price is not None
    # The day on which a file is read says nothing about its prices.
    return replace(price, source=source, date=date)


def _owned(name: str, table: _Table, convert: Callable[[_Table, Price], Price]) -> NamedPrice:
    """What a device that was bought costs an hour: its share of the purchase over the hours it is used."""
    text = table.take("purchase", str, 'money, as in "1200000 CNY"')
    amount, _, currency = text.strip().partition(" ")
    try:
        purchase = Decimal(amount)
    except InvalidOperation:
        purchase = Decimal("nan")
    if not purchase.is_finite() or purchase <= 0:
        raise table.error("purchase", f'{text!r} must be money above 0, as in "1200000 CNY"')
    years = table.number("years", "the years over which it is written off")
    utilisation = table.number("utilisation", "the share of these hours in which it is used, up to 1")
    if utilisation > 1:
        raise table.error("utilisation", f"{utilisation} is more than all the time; 0.6 is 60 %")
    devices = table.take("devices", int, "the number of devices that were bought, 1 or more", 1)
    if devices < 1:
        raise table.error("devices", f"{devices} must be the number of devices that were bought, 1 or more")
    is_default = table.take("default", bool, "true or false", False)
    source = table.take("source", str, "text: who says so", f"price file {table._path}")
    hours = years * HOURS_PER_YEAR * utilisation * devices
    formula = f"{text.strip()} / ({years} years x {HOURS_PER_YEAR} h x {utilisation} x {devices})"
    try:
        price = Price(
            purchase / hours,
            currency.strip().upper(),
            "device-hour",
            kind="owned",
            source=f"{source}: {formula}",
            date=table.date(),
        )
    except ValueError as error:
        raise table.error("purchase", str(error)) from None
    table.done()
    return NamedPrice(name, convert(table, price), (), is_default)


def _conversion(top: _Table) -> Callable[[_Table, Price], Price]:
    """Into the currency that the file reports in; only at a rate that is in the file, with its date."""
    currency = top.take("currency", str, 'three capital letters, as in "CNY"', None)
    rates: dict[str, tuple[Decimal, datetime.date]] = {}
    for name, table in top.tables("rates").items():
        rate = table.number("rate", f"how many {currency or 'units'} one {name} is")
        date = table.date()
        if date is None:
            raise table.error("date", "is missing; a rate is of a day, as in 2026-11-30")
        table.done()
        rates[name] = rate, date
    if rates and currency is None:
        raise top.error("currency", "is missing; [rates] convert into it")

    def convert(table: _Table, price: Price) -> Price:
        if currency is None or price.currency == currency:
            return price
        if price.currency not in rates:
            raise table.error(
                "price", f"{price} is not in {currency}: give the rate in [rates.{price.currency}]"
            )
        rate, date = rates[price.currency]
        source = f"{price.source}; {price} at {rate} {currency} of {date.isoformat()}"
        return replace(price, amount=price.amount * rate, currency=currency, source=source)

    return convert
