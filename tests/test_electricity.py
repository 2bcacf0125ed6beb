"""What electricity costs, and where it may be charged; figures by hand."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path

import pytest

import mlflow_tokens
from mlflow_tokens.pricing import Electricity, choose_price, cost_of_energy
from mlflow_tokens.pricing.price_file import VARIABLE, read_price_file
from tests.conftest import Stored

PLAIN = Electricity(Decimal("0.70"), "CNY", Decimal(1), Decimal(0))
SITE = Electricity(Decimal("0.70"), "CNY", Decimal("1.3"), Decimal(500))

FILE = """
[owned.ours]
purchase = "1051200 CNY"
years = 4
utilisation = 0.6
devices = 8
[prices.rented]
price = "15 CNY/device-hour"
[prices.stated_owned]
price = "15 CNY/device-hour owned"
[prices.changing]
price = "15 CNY/device-hour owned"
schedule = [{from = 2026-12-01T10:00:00+08:00, price = "12 CNY/device-hour spot"}]
[electricity]
tariff = "0.70 CNY/kWh"
pue = 1.3
node_overhead_watts = 500
source = "contract of the hall"
date = 2026-01-01
"""


def test_100_kwh_at_0_70_cny() -> None:
    assert cost_of_energy(PLAIN, 360_000_000, 0) == 70


def test_a_site_draws_more_than_its_devices() -> None:
    # 8 devices of 400 W for an hour are 3.2 kWh; their node draws 0.5 kWh beside; 3.7 x 1.3 = 4.81 kWh.
    joules, node_seconds = 8 * 400 * 3600, 3600
    assert cost_of_energy(SITE, joules, node_seconds) == Decimal("3.367")  # 4.81 x 0.70
    assert cost_of_energy(SITE, float(joules), float(node_seconds)) == Decimal("3.367")


def test_energy_that_was_not_measured_has_no_cost() -> None:
    assert cost_of_energy(SITE, None, 3600) is None
    assert cost_of_energy(SITE, 1.0, None) is None


@pytest.mark.parametrize(("joules", "seconds"), [(-1, 0), (0, -1), (float("nan"), 0), (0, float("inf"))])
def test_what_is_no_energy_is_an_error(joules: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="must be numbers, 0 or more"):
        cost_of_energy(PLAIN, joules, seconds)


@pytest.mark.parametrize(
    ("tariff", "pue", "overhead", "says"),
    [("0", "1", "0", "tariff=0"), ("0.7", "0.99", "0", "pue=0.99"), ("0.7", "1", "-1", "overhead_watts=-1")],
)
def test_electricity_is_checked_when_it_is_made(tariff: str, pue: str, overhead: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Electricity(Decimal(tariff), "CNY", Decimal(pue), Decimal(overhead))


def written(folder: Path, text: str = FILE) -> dict[str, str]:
    path = folder / "prices.toml"
    path.write_text(text, "utf-8")
    return {VARIABLE: str(path)}


@pytest.mark.parametrize("name", ["ours", "stated_owned", "15 CNY/device-hour owned"])
def test_electricity_goes_with_what_is_owned(tmp_path: Path, name: str) -> None:
    choice = choose_price(name, written(tmp_path))
    day = datetime.date(2026, 1, 1)
    made = Electricity(Decimal("0.70"), "CNY", Decimal("1.3"), Decimal(500), "contract of the hall", day)
    assert choice.electricity == made
    assert [notice for notice in choice.notices if "not charged yet" in notice]


@pytest.mark.parametrize(
    ("name", "price"),
    [
        ("rented", "15 CNY/device-hour"),
        ("changing", "12 CNY/device-hour spot"),
        ("2 CNY/device-hour", "2 CNY/device-hour"),
    ],
)
def test_rent_contains_its_electricity(tmp_path: Path, name: str, price: str) -> None:
    with pytest.raises(ValueError, match=r"prices\.toml: \[electricity\] cannot go with") as raised:
        choose_price(name, written(tmp_path))
    assert f"the price {price}, since rent contains it" in str(raised.value)


def test_without_a_price_there_is_nothing_to_charge_it_with(tmp_path: Path) -> None:
    choice = choose_price(None, written(tmp_path))
    assert (choice.price, choice.electricity, choice.notices) == (None, None, ())


def test_electricity_is_converted_at_the_rate_of_the_file(tmp_path: Path) -> None:
    text = "currency = 'CNY'\n[rates.USD]\nrate = '7.12'\ndate = 2026-11-30\n"
    path = Path(written(tmp_path, text + FILE.replace("0.70 CNY/kWh", "0.10 USD/kWh"))[VARIABLE])
    electricity = read_price_file(path).electricity
    assert electricity is not None
    assert (electricity.tariff, electricity.currency) == (Decimal("0.712"), "CNY")
    assert electricity.source == "contract of the hall; 0.10 USD/kWh at 7.12 CNY of 2026-11-30"


def test_electricity_in_another_currency_than_the_price(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\[electricity\] is in USD and the price in CNY: name one as"):
        choose_price("ours", written(tmp_path, FILE.replace("0.70 CNY/kWh", "0.10 USD/kWh")))


def test_a_tracker_takes_the_path_of_a_file_and_says_what_is_not_charged(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, FILE.replace("devices = 8", "devices = 8\ndefault = true"))
    with mlflow_tokens.Tracker(price=tmp_path / "prices.toml", journal_dir=tmp_path / "journal") as tracker:
        tracker.count(computed=10, valid=10)
        tracker.step()
    assert capsys.readouterr().err.count("Electricity is not charged yet") == 1
    assert stored.only_run().data.tags["mlflow_tokens.price"] == "6.25 CNY/device-hour owned"
