"""Prices as text, and what a held device costs at them."""

from __future__ import annotations

import datetime
from decimal import Decimal

import pytest

from mlflow_tokens.pricing import EXAMPLES, Price, parse_price

TODAY = datetime.date(2026, 11, 30)


@pytest.mark.parametrize(
    ("text", "amount", "currency", "unit", "devices"),
    [
        ("2.0 USD/device-hour", "2.0", "USD", "device-hour", None),
        ("15 CNY/device-hour", "15", "CNY", "device-hour", None),
        ("98.32 USD/instance-hour x8", "98.32", "USD", "instance-hour", 8),
        ("  .5usd / device-hour ", ".5", "USD", "device-hour", None),
        ("98.32 USD/instance-hour x 8", "98.32", "USD", "instance-hour", 8),
    ],
)
def test_valid_prices(text: str, amount: str, currency: str, unit: str, devices: int | None) -> None:
    price = parse_price(text, TODAY)
    assert price is not None
    assert (price.amount, price.currency, price.unit) == (Decimal(amount), currency, unit)
    assert (price.devices_per_instance, price.date, price.source) == (devices, TODAY, "stated by the user")


@pytest.mark.parametrize("kind", ["on-demand", "spot", "reserved", "owned"])
def test_a_price_says_of_which_kind_it_is(kind: str) -> None:
    text = f"2.0 USD/device-hour {kind}"
    price = parse_price(text)
    assert price is not None
    assert (price.kind, str(price)) == (kind, text)


@pytest.mark.parametrize("text", EXAMPLES)
def test_the_examples_shown_to_users_are_valid_and_print_as_they_were_given(text: str) -> None:
    assert str(parse_price(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2.0",
        "USD/device-hour",
        "2.0 USD",
        "2.0 USD/hour",
        "2.0 dollars/device-hour",
        "-2.0 USD/device-hour",
        "2,0 USD/device-hour",
        "1e3 USD/device-hour",
        "nan USD/device-hour",
        "inf USD/device-hour",
        "0 USD/device-hour",
        "2.0 USD/device-hour x8",
        "98.32 USD/instance-hour",
        "98.32 USD/instance-hour x0",
        "2.0 USD/device-hour; 3.0 USD/device-hour",
        "2.0 USD/device-hour cheap",
        "2.0 USD/device-year",
        "1460 USD/device-month x8",
        "29200 CNY/instance-month",
        2.0,
    ],
)
def test_what_is_not_a_price_is_an_error_that_shows_prices(text: object) -> None:
    with pytest.raises(ValueError, match=r"Valid prices: '2\.0 USD/device-hour'"):
        parse_price(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((2.0, "USD", "device-hour"), "Decimal"),
        ((Decimal(-2), "USD", "device-hour"), "above 0"),
        ((Decimal("nan"), "USD", "device-hour"), "above 0"),
        ((Decimal(2), "usd", "device-hour"), "capital letters"),
        ((Decimal(2), "USD", "hour"), "device-hour, instance-hour"),
        ((Decimal(2), "USD", "instance-hour"), "number of its devices"),
        ((Decimal(2), "USD", "device-hour", 8), "a device-hour is one device"),
    ],
)
def test_a_price_object_is_checked_when_it_is_made(values: tuple[object, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Price(*values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "hourly", "advice"),
    [
        ("10001 USD/device-hour", "10001 USD", "is that the amount a month, or is it of a whole instance"),
        ("80016 USD/instance-hour x8", "10002 USD", "a month, or has the instance more devices"),
        # 7,300,730 / 730 = 10,001.
        ("7300730 CNY/device-month", "10001 CNY", "a year, or is it of a whole instance"),
        ("0.00009 USD/device-hour", "9e-05 USD", "a second, or is the currency another"),
        # 0.0584 / 8 / 730 = 0.00001.
        ("0.0584 USD/instance-month x8", "1e-05 USD", "an hour, or has the instance fewer devices"),
        ("10000001 KRW/device-hour", "1e+07 KRW", "a month"),
    ],
)
def test_a_price_that_nothing_can_cost_is_refused_with_the_likely_mistake(
    text: str, hourly: str, advice: str
) -> None:
    with pytest.raises(ValueError, match="which no device costs") as raised:
        parse_price(text)
    assert advice in str(raised.value)
    assert f" is {hourly} a device-hour" in str(raised.value)


@pytest.mark.parametrize(
    "text",
    ["10000 USD/device-hour", "0.0001 USD/device-hour", "7300000 CNY/device-month", "16000 KRW/device-hour"],
)
def test_prices_at_the_limits_are_prices(text: str) -> None:
    assert str(parse_price(text)) == text


def test_no_price_stays_no_price() -> None:
    assert parse_price(None) is None


def per_hour(price: str, *devices_by_node: int) -> Decimal:
    parsed = parse_price(price)
    assert isinstance(parsed, Price)
    return parsed.per_device_second(devices_by_node) * sum(devices_by_node) * 3600


@pytest.mark.parametrize(
    ("price", "nodes", "hourly"),
    [
        ("2.0 USD/device-hour", (6,), "12"),
        ("98.32 USD/instance-hour x8", (8,), "98.32"),
        ("98.32 USD/instance-hour x8", (6,), "98.32"),  # not 73.74: the instance is rented whole
        ("98.32 USD/instance-hour x8", (8, 8), "196.64"),
        ("98.32 USD/instance-hour x8", (8, 1), "196.64"),
        ("98.32 USD/instance-hour x8", (9,), "196.64"),  # nine on one host are two instances
        ("1460 USD/device-month", (6,), "12"),  # 1,460 / 730 = 2 an hour each
        ("29200 CNY/instance-month x8 reserved", (6,), "40"),  # 29,200 / 730, the instance whole
        ("29200 CNY/instance-month x8 reserved", (8, 8), "80"),
    ],
)
def test_what_a_job_costs_an_hour(price: str, nodes: tuple[int, ...], hourly: str) -> None:
    assert round(per_hour(price, *nodes), 20) == Decimal(hourly)
