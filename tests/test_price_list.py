"""`mlflow-tokens prices`: what it lists, and what of each price it says."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from mlflow_tokens.cli import main
from mlflow_tokens.pricing.book import price_book
from mlflow_tokens.pricing.listing import listed_prices
from mlflow_tokens.pricing.price_file import VARIABLE

FILE = """
[prices.h100]
price = "2.50 USD/device-hour on-demand"
source = "contract [2026-17]"
date = 2026-01-01
default = true
schedule = [{from = 2026-12-01T10:00:00+08:00, price = "1.00 USD/device-hour spot"}]
[prices."aws/h100-80gb"]
price = "30 CNY/device-hour reserved"
[owned.ours]
purchase = "1051200 CNY"
years = 4
utilisation = 0.6
devices = 8
date = 2020-05-01
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    path = tmp_path / "prices.toml"
    path.write_text(FILE, "utf-8")
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setenv("COLUMNS", "100")
    return {VARIABLE: str(path)}


def test_prices_of_the_file_come_first_and_replace_the_book_s(file: dict[str, str]) -> None:
    lines = listed_prices(file)
    assert [line.name for line in lines[:3]] == ["h100", "aws/h100-80gb", "ours"]
    assert [line.origin for line in lines[:4]] == ["file", "file", "file", "book"]
    assert len(lines) == 3 + len(price_book()) - 1
    assert lines[1].price == "30 CNY/device-hour reserved"


def test_a_price_is_listed_with_all_that_is_known_of_it(file: dict[str, str]) -> None:
    (line,) = listed_prices(file, "2.50 usd", datetime.date(2026, 12, 1))
    assert (line.amount, line.currency, line.kind, line.default) == ("2.50", "USD", "on-demand", True)
    assert line.changes == (("2026-12-01T02:00:00+00:00", "1.00 USD/device-hour spot"),)
    # January to November 2026 are 334 days.
    assert line.warning == "334 days old, of 2026-01-01: check it"
    (owned,) = listed_prices(file, "owned", datetime.date(2026, 12, 1))
    assert (owned.name, owned.price, owned.warning) == ("ours", "6.25 CNY/device-hour owned", None)


def test_rows_of_the_book_grow_old() -> None:
    today = datetime.date(2026, 11, 9) + datetime.timedelta(days=181)
    (line,) = listed_prices({}, "p5.48xlarge", today)
    assert (line.name, line.origin, line.date) == ("aws/h100-80gb", "book", "2026-11-09")
    assert line.warning == "181 days old, of 2026-11-09: check it"


def test_the_table_and_its_notes(file: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prices", "h100"]) == 0
    shown = capsys.readouterr().out
    assert "h100 *" in shown and "2026-01-01 !" in shown and "runpod/h100-80gb/secure-cloud" in shown
    assert "(1) contract [2026-17]\n" in shown
    assert "https://www.runpod.io/pricing\n" in shown
    assert "h100: from 2026-12-01T02:00:00+00:00 1.00 USD/device-hour spot" in shown
    assert "! h100: " in shown and "days old, of 2026-01-01: check it" in shown
    assert "a100" not in shown and "ours" not in shown


def test_json(file: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prices", "--json", "a100-40gb"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["prices"]
    assert (line["name"], line["amount"], line["devices"]) == ("aws/a100-40gb", "21.957642", 8)
    assert line["page"].startswith("https://aws.amazon.com/") and line["via"].startswith("https://")


def test_no_price_and_no_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert main(["prices", "[nothing]"]) == 0
    assert "No price contains '[nothing]'" in capsys.readouterr().out
    assert main(["prices", "--json", "nothing"]) == 0
    assert json.loads(capsys.readouterr().out) == {"prices": []}
    monkeypatch.setenv(VARIABLE, "/no/such.toml")
    assert main(["prices"]) == 2
    assert "the price file /no/such.toml cannot be read" in capsys.readouterr().err
