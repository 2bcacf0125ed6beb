"""Prices by name, their schedule, owned hardware and rates, out of a TOML file; figures by hand."""

from __future__ import annotations

import datetime
import json
import time
from decimal import Decimal
from pathlib import Path

import pytest

import mlflow_tokens
from mlflow_tokens.account import account_of
from mlflow_tokens.pricing import Price, choose_price
from mlflow_tokens.pricing.price_file import VARIABLE, read_price_file
from mlflow_tokens.records import Quantities, Record
from tests.conftest import Stored
from tests.jobs import recorded
from tests.journals import price, quantities, segment

FILE = """
currency = "CNY"

[rates.USD]
rate = "7.12"
date = 2026-11-30

[prices.a800]
price = "15 CNY/device-hour reserved"
source = "contract 2026-17"
date = 2026-11-01
default = true

[prices.h100]
price = "2.50 USD/device-hour on-demand"

[[prices.h100.schedule]]
from = 2026-12-01T10:00:00+08:00
price = "1.00 USD/device-hour spot"

[[prices.h100.schedule]]
from = 2026-12-01T12:00:00+08:00
price = "2.00 USD/device-hour spot"

[owned.ours]
purchase = "1051200 CNY"
years = 4
utilisation = 0.6
devices = 8
source = "invoice 2024-3"
date = 2024-05-01
"""


def written(folder: Path, text: str = FILE) -> dict[str, str]:
    path = folder / "prices.toml"
    path.write_text(text, "utf-8")
    return {VARIABLE: str(path)}


def at(hour: int) -> float:
    """An hour of the 1st of December 2026 in China, in s since the epoch."""
    zone = datetime.timezone(datetime.timedelta(hours=8))
    return datetime.datetime(2026, 12, 1, hour, tzinfo=zone).timestamp()


def test_a_price_by_its_name(tmp_path: Path) -> None:
    price = choose_price(" a800 ", written(tmp_path)).price
    day = datetime.date(2026, 11, 1)
    assert price == Price(Decimal(15), "CNY", "device-hour", None, "reserved", "contract 2026-17", day)


def test_the_default_and_a_price_that_is_stated_in_full(tmp_path: Path) -> None:
    environ = written(tmp_path)
    default = choose_price(None, environ).price
    assert default is not None
    assert str(default) == "15 CNY/device-hour reserved"
    stated = choose_price("2 USD/device-hour", environ).price
    assert stated is not None
    # The file reports in CNY: 2 x 7.12.
    assert str(stated) == "14.24 CNY/device-hour"
    assert stated.source == "stated by the user; 2 USD/device-hour at 7.12 CNY of 2026-11-30"
    with pytest.raises(ValueError, match=r"give the rate in \[rates\.EUR\]"):
        choose_price("2 EUR/device-hour", environ)
    assert choose_price(None, {}).price is None
    assert choose_price(None, written(tmp_path, "[prices.x]\nprice = '1 USD/device-hour'")).price is None


def test_a_file_of_which_the_path_is_stated_goes_before_the_one_in_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[prices.a]\nprice = '4 USD/device-hour'\ndefault = true", "utf-8")
    environ = written(tmp_path)
    for stated in (path, str(path), f" {path} "):
        chosen = choose_price(stated, environ).price
        assert chosen is not None
        assert str(chosen) == "4 USD/device-hour"
    path.write_text("[prices.a]\nprice = '4 USD/device-hour'", "utf-8")
    with pytest.raises(ValueError, match=r"mine\.toml has no price with default = true \(it has 'a'\)"):
        choose_price(path, environ)
    with pytest.raises(ValueError, match="cannot be read"):
        choose_price("none.toml", environ)


def test_prices_that_change_are_converted_at_the_rate_of_the_file(tmp_path: Path) -> None:
    choice = choose_price("h100", written(tmp_path))
    # 2.50, 1.00 and 2.00 USD at 7.12.
    amounts = [price.amount for hour in (9, 10, 11, 12, 13) if (price := choice.at(at(hour)))]
    assert amounts == [Decimal("17.8"), *[Decimal("7.12")] * 2, *[Decimal("14.24")] * 2]
    spot = choice.at(at(11))
    assert spot is not None
    assert (spot.currency, spot.kind, spot.date) == ("CNY", "spot", None)
    assert spot.source.endswith("1.00 USD/device-hour spot at 7.12 CNY of 2026-11-30")


def test_hardware_that_was_bought(tmp_path: Path) -> None:
    price = choose_price("ours", written(tmp_path)).price
    assert price is not None
    # 1,051,200 / (4 x 8,760 x 0.6 x 8) = 1,051,200 / 168,192 = 6.25.
    assert (price.amount, price.currency, price.kind) == (Decimal("6.25"), "CNY", "owned")
    assert price.source == "invoice 2024-3: 1051200 CNY / (4 years x 8760 h x 0.6 x 8)"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[prices.a]", "[prices.a] price: is missing"),
        ("[prices.a]\nprice = 2", '[prices.a] price: 2 must be a price, as in "2.0 USD'),
        ("[prices.a]\nprice = '2 USD'", "[prices.a] price: price='2 USD' cannot be used"),
        ("[prices.a]\nprice = '-2 USD/device-hour'", "cannot be used"),
        ("[prices.a]\nprice = '9999999 USD/device-hour'", "which no device costs"),
        ("[prices.a]\nprice = '0.00001 USD/device-hour'", "which no device costs"),
        ("[prices.a]\nprice = '2 USD/device-hour'\nsource = 7", "[prices.a] source: 7 must be text"),
        ("[prices.a]\nprice = '2 USD/device-hour'\ndate = '2026'", "[prices.a] date: '2026' must be a date"),
        ("[prices.a]\nprice = '2 USD/device-hour'\ndate = 2026-01-01T00:00:00", "without a time"),
        ("[prices.a]\nprice = '2 USD/device-hour'\ndefault = 1", "[prices.a] default: 1 must be true or"),
        ("[prices.a]\nprice = '2 USD/device-hour'\ncurrency = 'USD'", "[prices.a] unknown: currency"),
        ("[prices.a]\nprice = '2 USD/device-hour'\nschedule = 1", "[prices.a] schedule: 1 must be an array"),
        ("[prices.a]\nprice = '2 USD/device-hour'\nschedule = [1]", "must be a table with `from`"),
        (
            "[prices.a]\nprice = '2 USD/device-hour'\nschedule = [{price = '1 USD/device-hour'}]",
            "[prices.a.schedule 1] from: is missing",
        ),
        (
            "[prices.a]\nprice = '2 USD/device-hour'\n"
            "schedule = [{from = 2026-12-01, price = '1 USD/device-hour'}]",
            "[prices.a.schedule 1] from: datetime.date(2026, 12, 1) must be a moment",
        ),
        (
            "[prices.a]\nprice = '2 USD/device-hour'\nschedule = [{from = 2026-12-01T10:00:00Z}]",
            "[prices.a.schedule 1] price: is missing",
        ),
        (
            "[prices.a]\nprice = '2 USD/device-hour'\n"
            "schedule = [{from = 2026-12-01T10:00:00Z, price = '1 USD/device-hour', kind = 'spot'}]",
            "[prices.a.schedule 1] unknown: kind",
        ),
        (
            "[prices.a]\nprice = '2 USD/device-hour'\n"
            "schedule = [{from = 2026-12-01T10:00:00, price = '1 USD/device-hour'}]",
            "must have a time zone",
        ),
        (
            "[prices.a]\nprice = '2 USD/device-hour'\n"
            "schedule = [{from = 2026-12-01T10:00:00Z, price = '1 CNY/device-hour'}]",
            "another currency",
        ),
        (
            "[prices.a]\nprice = '2 USD/device-hour'\n"
            "schedule = [{from = 2026-12-01T10:00:00Z, price = '1 USD/device-hour'},"
            " {from = 2026-12-01T10:00:00Z, price = '3 USD/device-hour'}]",
            "must be later than the entry before",
        ),
        ("prices = 3", "prices: 3 must be a table of tables"),
        ("prices.a = 3", "prices.a: 3 must be a table"),
        ("price = 3", "unknown: price"),
        ("[prices.a", "is not TOML"),
        ("currency = 3", 'currency: 3 must be three capital letters, as in "CNY"'),
        ("[rates.USD]\nrate = 7\ndate = 2026-11-30", "currency: is missing; [rates] convert into it"),
        (
            "currency = 'CNY'\n[rates.USD]\nrate = 0\ndate = 2026-11-30",
            "[rates.USD] rate: 0 must be how many",
        ),
        ("currency = 'CNY'\n[rates.USD]\nrate = 'x'\ndate = 2026-11-30", "above 0"),
        ("currency = 'CNY'\n[rates.USD]\nrate = true\ndate = 2026-11-30", "True must be how many"),
        ("currency = 'CNY'\n[rates.USD]\nrate = 7", "[rates.USD] date: is missing; a rate is of a day"),
        ("currency = 'CNY'\n[prices.a]\nprice = '2 USD/device-hour'", "give the rate in [rates.USD]"),
        ("currency = 'cny'", "currency: 'cny' must be three capital letters"),
        (
            "currency = 'CNY'\n[rates.usd]\nrate = 7\ndate = 2026-11-30",
            "[rates.usd] must be named by a currency",
        ),
        (
            "currency = 'CNY'\n[rates.USD]\nrate = '1e30'\ndate = 2026-11-30",
            "[rates.USD] rate: '1e30' must be",
        ),
        ("currency = 'CNY'\n[rates.USD]\nrate = 7\ndate = 2026-11-30\nto = 'CNY'", "[rates.USD] unknown: to"),
        (
            "currency = 'CNY'\n[rates.USD]\nrate = 1_000_000\ndate = 2026-11-30\n"
            "[prices.a]\nprice = '2 USD/device-hour'",
            "[prices.a] price: 2000000 CNY/device-hour is 2e+06 CNY a device-hour, which no device costs",
        ),
        ("[owned.a]\nyears = 4\nutilisation = 1", "[owned.a] purchase: is missing"),
        ("[owned.a]\npurchase = 9\nyears = 4\nutilisation = 1", "[owned.a] purchase: 9 must be money"),
        ("[owned.a]\npurchase = '90000 CNY'\nutilisation = 1", "[owned.a] years: is missing"),
        ("[owned.a]\npurchase = '90000 CNY'\nyears = 4", "[owned.a] utilisation: is missing"),
        ("[owned.a]\npurchase = '90000 CNY'\nyears = 4\nutilisation = 0", "[owned.a] utilisation: 0 must be"),
        (
            "[owned.a]\npurchase = '90000 CNY'\nyears = 4\nutilisation = 1\ndevices = 8.0",
            "[owned.a] devices: 8.0 must be the number",
        ),
        (
            "[owned.a]\npurchase = '90000 CNY'\nyears = 4\nutilisation = 1\nsource = 7",
            "[owned.a] source: 7 must be text",
        ),
        (
            "[owned.a]\npurchase = '90000 CNY'\nyears = 4\nutilisation = 1\ndate = '2026'",
            "[owned.a] date: '2026' must be a date",
        ),
        (
            "[owned.a]\npurchase = '90000 CNY'\nyears = 4\nutilisation = 1\ndefault = 'yes'",
            "[owned.a] default: 'yes' must be true or false",
        ),
        ("electricity = 1", "electricity: 1 must be a table"),
        ("[electricity]\npue = 1.3\nnode_overhead_watts = 0", "[electricity] tariff: is missing"),
        ("[electricity]\ntariff = 0.7", "[electricity] tariff: 0.7 must be money a kWh, as in"),
        ("[electricity]\ntariff = '0.7 CNY'", "[electricity] tariff: '0.7 CNY' must be money a kWh"),
        ("[electricity]\ntariff = '0.7 CNY/kWh'", "[electricity] pue: is missing"),
        (
            "[electricity]\ntariff = '0 CNY/kWh'\npue = 1\nnode_overhead_watts = 0",
            "[electricity] tariff=0 must be money a kWh, above 0",
        ),
        (
            "[electricity]\ntariff = '0.7 CNY/kWh'\npue = 0.9\nnode_overhead_watts = 0",
            "[electricity] pue=0.9 is below 1",
        ),
        ("[electricity]\ntariff = '0.7 CNY/kWh'\npue = 1", "[electricity] node_overhead_watts: is missing"),
        (
            "[electricity]\ntariff = '0.7 CNY/kWh'\npue = 1\nnode_overhead_watts = -1",
            "[electricity] node_overhead_watts: -1 must be what a node draws beside its devices, in W, 0",
        ),
        (
            "[electricity]\ntariff = '0.7 CNY/kWh'\npue = 1\nnode_overhead_watts = 0\nsource = 7",
            "[electricity] source: 7 must be text",
        ),
        (
            "[electricity]\ntariff = '0.7 CNY/kWh'\npue = 1\nnode_overhead_watts = 0\ndate = 7",
            "[electricity] date: 7 must be a date",
        ),
        (
            "[electricity]\ntariff = '0.7 CNY/kWh'\npue = 1\nnode_overhead_watts = 0\nwatts = 7",
            "[electricity] unknown: watts",
        ),
        (
            "currency = 'CNY'\n[electricity]\ntariff = '0.1 USD/kWh'\npue = 1\nnode_overhead_watts = 0",
            "[electricity] tariff: 0.1 USD/kWh is not in CNY: give the rate in [rates.USD]",
        ),
        ("[owned.a]\npurchase = 'x CNY'\nyears = 4\nutilisation = 1", "'x CNY' must be money above 0"),
        ("[owned.a]\npurchase = '9'\nyears = 4\nutilisation = 1", "[owned.a] purchase: currency=''"),
        ("[owned.a]\npurchase = '90000 CNY'\nyears = -1\nutilisation = 1", "[owned.a] years: -1 must be"),
        ("[owned.a]\npurchase = '90000 CNY'\nyears = 4\nutilisation = 60", "60 is more than all the time"),
        ("[owned.a]\npurchase = '90000 CNY'\nyears = 4\nutilisation = 1\ndevices = 0", "1 or more"),
        (
            "[owned.a]\npurchase = '90000 CNY'\nyears = 4\nutilisation = 1\npower = 1",
            "[owned.a] unknown: power",
        ),
        (
            "[owned.a]\npurchase = '90000 CNY'\nyears = 4\nutilisation = 1\n"
            "[prices.a]\nprice = '2 CNY/device-hour'",
            "there is a price of this name, too",
        ),
        (
            "[prices.a]\nprice = '2 CNY/device-hour'\ndefault = true\n"
            "[prices.b]\nprice = '2 CNY/device-hour'\ndefault = true",
            "several prices with default = true",
        ),
    ],
)
def test_every_field_wrong_once(tmp_path: Path, text: str, says: str) -> None:
    path = Path(written(tmp_path, text)[VARIABLE])
    with pytest.raises(ValueError, match="price file") as raised:
        read_price_file(path)
    assert says in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        choose_price("a", {VARIABLE: str(tmp_path / "none.toml")})
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not TOML"):
        choose_price("a", {VARIABLE: str(tmp_path / "x.toml")})


def test_a_name_that_is_none_says_which_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"or a name out of .*prices\.toml, such as 'a800'"):
        choose_price("a80", written(tmp_path))
    with pytest.raises(ValueError, match=r"that \$MLFLOW_TOKENS_PRICES names"):
        choose_price("a80", {})


def test_a_run_is_billed_at_the_price_of_the_moment(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 USD a second, and from some seconds after the start on 2: what is held before is charged at 1."""
    soon = datetime.datetime.fromtimestamp(time.time() + 4, datetime.timezone.utc)
    text = f"""
[prices.spot]
price = "3600 USD/device-hour spot"
[[prices.spot.schedule]]
from = {soon.isoformat()}
price = "7200 USD/device-hour spot"
"""
    for name, value in written(tmp_path, text).items():
        monkeypatch.setenv(name, value)
    journals = tmp_path / "journal"
    tracker = mlflow_tokens.Tracker(price="spot", log_every_steps=1, journal_dir=journals)
    tracker.count(computed=10, valid=10)
    tracker.step()
    deadline = time.monotonic() + 30
    while len(recorded(journals, "price")) < 3:  # the first is written twice, and both are one record each
        assert time.monotonic() < deadline
        time.sleep(0.02)
    tracker.count(computed=10, valid=10)
    tracker.step()
    tracker.close()
    (path,) = journals.glob("*.jsonl")
    lines = [json.loads(line[9:]) for line in path.read_text().splitlines()]
    places = [number for number, line in enumerate(lines) if line["record"] == "price"]
    before = lines[places[-1] - 2]
    assert (before["record"], before["kind"]) == ("quantities", "heartbeat")
    held = [line["elapsed"] for line in lines if line["record"] == "quantities"]
    early, late = before["elapsed"], held[-1] - before["elapsed"]
    assert late > 0
    assert stored.metrics()["cost/total"] == pytest.approx(early + 2 * late, rel=1e-6)


def test_three_hours_on_demand_and_spot_with_an_outage_and_a_gap() -> None:
    """On demand at 3.00 for an hour, spot at a third from then on.

    Trained for 80 minutes, out for 20 inside the allocation, trained for 20 more; released for an hour;
    trained for another hour in a second allocation: 3 h of training and outage at the machines' expense.
    """

    def at(name: str, seq: int, minute: int, trained: int) -> Quantities:
        seconds, tokens = 60.0 * minute, trained
        return quantities(
            name,
            seq=seq,
            t_mono=seconds,
            t_wall=seconds,
            train=60.0 * trained,
            computed=tokens,
            valid=tokens,
        )

    spot = price("1.00 USD/device-hour spot")
    records: list[Record] = [
        segment("a", allocation="night", boot="m"),
        price("3.00 USD/device-hour on-demand"),
        at("a", 1, 60, 60),
        spot,
        at("a", 2, 80, 80),
        segment("b", allocation="night", boot="m"),
        spot,
        at("b", 3, 120, 20),
        segment("c", allocation="day", boot="m"),
        spot,
        at("c", 4, 240, 60),
    ]
    account = account_of(records)
    # 60 min at 3.00; 20 + 20 (outage) + 20 + 60 min at 1.00.
    assert account.cost is not None
    assert round(account.cost, 12) == Decimal("5.00")
    assert account.cost_of(phase="restart") == pytest.approx(Decimal(1) / 3, rel=Decimal("1e-12"))
    assert account.gap_seconds == 3600
    assert account.computed == 160
