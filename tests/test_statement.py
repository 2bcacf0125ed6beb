"""The cost statement: lines by hand, that add up to the total exactly; in the log, MLflow and its note."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import mlflow
import pytest

import mlflow_tokens
from mlflow_tokens.account import Account, account_of
from mlflow_tokens.cli import main
from mlflow_tokens.records import CarriedOver, PriceSet, Record, Rollback
from mlflow_tokens.snapshot import derive
from mlflow_tokens.statement import Statement, statement_of
from mlflow_tokens.statement_text import to_html, to_json, to_markdown, to_text
from tests.conftest import Stored
from tests.journals import price, quantities, segment

#: 1 USD a second.
PRICE = "3600 USD/device-hour"


def statement(*records: Record) -> Statement:
    return statement_of(account_of(records), "FINISHED")


def amounts(statement: Statement) -> dict[str, Decimal]:
    return {line.item: line.amount for line in statement.lines}


def a_third_rolled_back() -> Account:
    """100 s of training, 60 % valid; the last third was thrown away."""
    return account_of(
        [
            segment(),
            price(PRICE),
            quantities(seq=1, step=20, position=20, train=200 / 3, computed=2000, valid=1200),
            quantities(seq=2, step=30, position=30, train=100.0, computed=3000, valid=1800),
            Rollback("a", 0.0, "a", 20),
            quantities(seq=3, step=20, position=20, train=100.0, computed=3000, valid=1800, rewinds=1),
        ]
    )


def test_a_third_rolled_back_and_40_percent_padding() -> None:
    """33.3 / 26.7 / 40 of 100."""
    made = statement_of(a_third_rolled_back(), "FAILED")
    found = amounts(made)
    assert {item: round(amount, 1) for item, amount in found.items()} == {
        "effective": Decimal("40.0"),
        "padding": Decimal("26.7"),
        "lost": Decimal("33.3"),
    }
    assert sum(found.values()) == made.total == 100
    assert made.effective == 1200
    assert made.per_million == Decimal(100) * 1_000_000 / 1200
    # 40 % of what is left of the training is what packing would save at most.
    assert made.saving == found["padding"]


def test_rows_of_10_20_30_and_100_padded_to_100_cost_60_percent_of_the_training() -> None:
    made = statement(segment(), price(PRICE), quantities(train=50.0, computed=400, valid=160))
    assert amounts(made) == {"effective": Decimal(20), "padding": Decimal(30)}
    account = account_of([segment(), price(PRICE), quantities(train=50.0, computed=400, valid=160)])
    assert derive(account, account, "final").metrics["cost/waste/padding"] == 30


def test_every_phase_is_a_line_and_none_is_in_two() -> None:
    made = statement(
        segment(),
        price(PRICE),
        quantities(
            startup=5.0,
            train=60.0,
            data_wait=7.0,
            eval=11.0,
            checkpoint=3.0,
            other=2.0,
            computed=10,
            valid=10,
        ),
    )
    assert amounts(made) == {
        "effective": 60,
        "padding": 0,
        "startup": 5,
        "data_wait": 7,
        "eval": 11,
        "checkpoint": 3,
        "other": 2,
    }
    assert made.total == 88
    assert sum(line.share for line in made.lines) == pytest.approx(1)


def test_what_is_unknown_is_said_and_not_guessed() -> None:
    fed = quantities(train=10.0, computed=100, valid=90)
    assert statement(segment(), fed).unknown == ("no_price",)
    assert statement(segment(), fed).lines == ()
    assert statement(segment(devices_by_node=(2,)), price(PRICE), fed).unknown == ("ranks_missing",)
    # The second segment has no price.
    later = quantities("b", seq=2, train=1.0, computed=1, valid=1)
    assert statement(segment(), price(PRICE), fed, segment("b"), later).unknown == ("unpriced",)
    unknown = CarriedOver("r", "", 5, "unknown", 5, 5, 0.0, 0.0, {}, {})
    made = statement(unknown, segment(), price(PRICE), quantities(train=10.0, computed=100, rewinds=1))
    assert (made.total, made.effective, made.device_hours) == (None, None, None)
    assert "past_unknown" in made.unknown
    # Valid tokens unknown: padding cannot be told from training.
    made = statement(segment(), price(PRICE), quantities(train=10.0, computed=100))
    assert amounts(made) == {"train": 10}
    assert "padding" in made.unseen


def test_whose_power_is_paid_for_already() -> None:
    rented = price("2 USD/device-hour")
    owned = PriceSet(0.0, mlflow_tokens.Price(Decimal(2), "USD", "device-hour", kind="owned"))
    fed = quantities(train=10.0, computed=100, valid=100)
    assert "host_power" not in statement(segment(), rented, fed).unseen
    assert "host_power" in statement(segment(), owned, fed).unseen


def test_all_prices_of_a_run_are_listed_once() -> None:
    spot = "1200 USD/device-hour"
    made = statement(
        segment(),
        price(PRICE),
        quantities(seq=1, train=10.0, computed=10, valid=10),
        price(spot),
        quantities(seq=2, train=20.0, computed=20, valid=20),
        segment("b"),
        price(spot),
        quantities("b", seq=3, train=3.0, computed=5, valid=5),
    )
    assert [str(each) for each in made.prices] == [PRICE, spot]
    # 10 s at 1, 13 s at a third.
    assert round(made.total or 0, 9) == round(Decimal(10) + Decimal(13) / 3, 9)


def test_texts() -> None:
    made = statement_of(a_third_rolled_back(), "FAILED")
    text = to_text(made)
    assert len(text.splitlines()) <= 24  # a screen
    for words in (
        "total · 合计",
        "100.00 USD",
        "33.33",
        "26.67",
        "40.00",
        "stated by the user",
        "40 % padding",
    ):
        assert words in text
    assert "max-width" in to_html(made)
    assert "http" not in to_html(made)
    assert to_markdown(made).startswith("| | |\n|---|---:|\n")
    values = json.loads(to_json(made))
    assert sum(Decimal(line["amount"]) for line in values["lines"]) == Decimal(values["total"]) == 100
    assert values["prices"][0]["amount"] == "3600"
    assert values["tokens"] == {"computed": 3000, "valid": 1800, "effective": 1200}


def test_a_run_of_which_nothing_is_known_has_a_statement_too() -> None:
    made = statement(segment(devices_by_node=(2,)), price(PRICE), quantities())
    assert (made.effective, made.computed, made.device_hours, made.total) == (None, None, None, None)
    assert "not every rank has reported" in to_text(made)
    assert "not every rank has reported" in to_html(made)
    assert "not every rank has reported" in to_markdown(made)
    assert json.loads(to_json(made))["total"] is None


def test_hostile_names_are_inert() -> None:
    made = statement(segment(device_type="<script>alert(1)</script>"), quantities(train=1.0, computed=1))
    assert "<script>" not in to_html(made)


def train(steps: int = 10) -> None:
    tracker = mlflow_tokens.Tracker(price=PRICE)
    for _ in range(steps):
        tracker.count(computed=10, valid=6)
        tracker.step()
    tracker.close()


def artifacts(stored: Stored) -> dict[str, str]:
    run = stored.only_run().info.run_id
    return {
        name: Path(
            mlflow.artifacts.download_artifacts(run_id=run, artifact_path=f"mlflow_tokens/{name}")
        ).read_text()
        for name in ("statement.html", "statement.json")
    }


def test_a_run_has_its_statement_in_the_log_among_its_artifacts_and_as_its_note(
    stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    train()
    said = capsys.readouterr().err
    assert "What the money of this run bought · 本次运行的花费换来了什么" in said
    kept = artifacts(stored)
    values = json.loads(kept["statement.json"])
    assert Decimal(values["total"]) == sum(Decimal(line["amount"]) for line in values["lines"])
    assert float(values["total"]) == pytest.approx(stored.metrics()["cost/total"], rel=1e-12)
    assert values["status"] == "FINISHED"
    assert "合计" in kept["statement.html"]
    note = stored.only_run().data.tags["mlflow.note.content"]
    assert note.startswith("### What the money of this run bought")
    assert f"{60:,}" in note


def test_a_report_that_cannot_be_made_does_not_keep_the_run_from_ending(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow_tokens import recorder

    monkeypatch.setattr(recorder, "to_text", lambda statement: 1 / 0)
    train()
    assert stored.only_run().info.status == "FINISHED"
    assert stored.metrics()["tokens/computed"] == 100
    assert "The run's report could not be made: ZeroDivisionError" in capsys.readouterr().err


def test_a_note_of_the_users_stays(stored: Stored) -> None:
    with mlflow.start_run():
        mlflow.set_tag("mlflow.note.content", "mine")
        train()
    assert stored.only_run().data.tags["mlflow.note.content"] == "mine"


def test_a_run_that_goes_on_has_the_newest_statement(stored: Stored) -> None:
    with mlflow.start_run() as run:
        train()
    with mlflow.start_run(run_id=run.info.run_id):
        train()
    assert json.loads(artifacts(stored)["statement.json"])["tokens"]["computed"] == 200
    assert "| 120 |" in stored.only_run().data.tags["mlflow.note.content"]


def test_sync_leaves_the_statement_of_a_dead_job(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_TOKENS_JOURNAL_DIR", str(tmp_path / "j"))
    train()
    mlflow.set_tracking_uri(stored.uri)
    assert main(["sync", str(tmp_path / "j"), "--tracking-uri", stored.uri]) == 0
    assert json.loads(artifacts(stored)["statement.json"])["tokens"]["computed"] == 100
