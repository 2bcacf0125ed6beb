"""A team's prices in a TOML file: named, dated, with what changes during a run, and owned hardware."""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

from mlflow_tokens.pricing.currency import Rate, Rates
from mlflow_tokens.pricing.electricity import Electricity
from mlflow_tokens.pricing.price import Price, is_currency, parse_price
from mlflow_tokens.pricing.toml_table import Table, as_decimal

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

#: Names the file.
VARIABLE = "MLFLOW_TOKENS_PRICES"

HOURS_PER_YEAR = 8760


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
    """What a price file holds.

    rates: into the currency that all prices are converted to, if the file names one. electricity: of owned
    hardware, in that currency.
    """

    path: Path
    prices: Mapping[str, NamedPrice]
    rates: Rates
    electricity: Electricity | None

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
    top = Table(path, "", content)
    rates = _rates(top)
    prices: dict[str, NamedPrice] = {}
    for name, table in top.tables("prices").items():
        prices[name] = _named(name, table, rates)
    for name, table in top.tables("owned").items():
        if name in prices:
            raise table.error(None, "there is a price of this name, too")
        prices[name] = _owned(name, table, rates)
    electricity = _electricity(top.table("electricity"), rates)
    top.done()
    if sum(named.is_default for named in prices.values()) > 1:
        raise ValueError(f"the price file {path} has several prices with default = true")
    return PriceFile(path, prices, rates, electricity)


def _named(name: str, table: Table, rates: Rates) -> NamedPrice:
    price = _price(table)
    is_default = table.take("default", bool, "true or false", False)
    changes: list[Change] = []
    for number, values in enumerate(table.take("schedule", list, "an array of tables", [])):
        if not isinstance(values, dict):
            raise table.error("schedule", f"{values!r} must be a table with `from` and `price`")
        entry = Table(table.path, f"{table.name}.schedule {number + 1}", values)
        begin = entry.take("from", datetime.datetime, "a moment, as in 2026-12-01T10:00:00+08:00")
        if begin.tzinfo is None:
            raise entry.error("from", f"{begin.isoformat()} must have a time zone, as in …T10:00:00+08:00")
        changed = _price(entry)
        entry.done()
        if changes and begin.timestamp() <= changes[-1].t_wall:
            raise entry.error("from", "must be later than the entry before")
        if changed.currency != price.currency:
            raise entry.error("price", f"{changed} is in another currency than {price}")
        changes.append(Change(begin.timestamp(), _converted(entry, "price", changed, rates)))
    table.done()
    return NamedPrice(name, _converted(table, "price", price, rates), tuple(changes), is_default)


def _price(table: Table) -> Price:
    text = table.take("price", str, 'a price, as in "2.0 USD/device-hour spot"')
    source, date = table.source(), table.date()
    try:
        price = parse_price(text)
    except ValueError as error:
        raise table.error("price", error) from None
    assert price is not None
    # The day on which a file is read says nothing about its prices.
    return replace(price, source=source, date=date)


def _converted(table: Table, field: str, price: Price, rates: Rates) -> Price:
    try:
        return rates.convert(price)
    except ValueError as error:
        raise table.error(field, error) from None


def _owned(name: str, table: Table, rates: Rates) -> NamedPrice:
    """What a device that was bought costs an hour: its share of the purchase over the hours it is used."""
    text = table.take("purchase", str, 'money, as in "1200000 CNY"')
    amount, _, currency = text.strip().partition(" ")
    purchase = as_decimal(amount)
    if purchase is None or purchase <= 0:
        raise table.error("purchase", f'{text!r} must be money above 0, as in "1200000 CNY"')
    years = table.number("years", "the years over which it is written off")
    utilisation = table.number("utilisation", "the share of these hours in which it is used, up to 1")
    if utilisation > 1:
        raise table.error("utilisation", f"{utilisation} is more than all the time; 0.6 is 60 %")
    devices = table.take("devices", int, "the number of devices that were bought, 1 or more", 1)
    if devices < 1:
        raise table.error("devices", f"{devices} must be the number of devices that were bought, 1 or more")
    is_default = table.take("default", bool, "true or false", False)
    hours = years * HOURS_PER_YEAR * utilisation * devices
    formula = f"{text.strip()} / ({years} years x {HOURS_PER_YEAR} h x {utilisation} x {devices})"
    source, date = f"{table.source()}: {formula}", table.date()
    unit_price, code = purchase / hours, currency.strip().upper()
    try:
        price = Price(unit_price, code, "device-hour", kind="owned", source=source, date=date)
    except ValueError as error:
        raise table.error("purchase", error) from None
    table.done()
    return NamedPrice(name, _converted(table, "purchase", price, rates), (), is_default)


def _electricity(table: Table | None, rates: Rates) -> Electricity | None:
    if table is None:
        return None
    what = 'money a kWh, as in "0.70 CNY/kWh"'
    text = table.take("tariff", str, what)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Z]{3})\s*/\s*kWh\s*", text)
    if match is None:
        raise table.error("tariff", f"{text!r} must be {what}")
    tariff, currency = Decimal(match[1]), match[2]
    pue = table.number("pue", "all energy of the site over that of its machines, as in 1.3")
    overhead = table.number("node_overhead_watts", "what a node draws beside its devices, in W", or_zero=True)
    source, date = table.source(), table.date()
    table.done()
    try:
        rate = rates.rate_of(currency, text)
    except ValueError as error:
        raise table.error("tariff", error) from None
    if rate is not None and rates.currency is not None:
        source += f"; {rates.said(text.strip(), rate)}"
        tariff, currency = tariff * rate.rate, rates.currency
    try:
        return Electricity(tariff, currency, pue, overhead, source, date)
    except ValueError as error:
        raise table.error(None, error) from None


def _rates(top: Table) -> Rates:
    currency = top.take("currency", str, 'three capital letters, as in "CNY"', None)
    if currency is not None and not is_currency(currency):
        raise top.error("currency", f'{currency!r} must be three capital letters, as in "CNY"')
    rates: dict[str, Rate] = {}
    for name, table in top.tables("rates").items():
        if not is_currency(name):
            raise table.error(None, "must be named by a currency in three capital letters, as in [rates.USD]")
        rate = table.number("rate", f"how many {currency or 'units'} one {name} is")
        date = table.date()
        if date is None:
            raise table.error("date", "is missing; a rate is of a day, as in 2026-11-30")
        table.done()
        rates[name] = Rate(rate, date)
    if rates and currency is None:
        raise top.error("currency", "is missing; [rates] convert into it")
    return Rates(currency, rates)
