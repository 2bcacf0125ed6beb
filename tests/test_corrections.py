"""What a run cost by its invoice: added, never changed, shown, and the original kept."""

from __future__ import annotations

import json
from pathlib import Path

import mlflow
import pytest

import mlflow_tokens
from mlflow_tokens.cli import main
from mlflow_tokens.comparison.corrections import TAG_PREFIX, corrections_of
from mlflow_tokens.comparison.mlflow_reader import MlflowReader
from mlflow_tokens.comparison.table import RankedRun, rank
from tests.conftest import Stored
from tests.stored_runs import START_MS, StoredRun


def stored_run(stored: Stored, run: StoredRun) -> str:
    """A run of 4.00 CNY and 1.6 M effective tokens, and the like."""
    tags = run.tags()
    made = stored.client.create_run("0", start_time=START_MS, run_name=run.name, tags=tags)
    for name, value in run.metrics(run.steps).items():
        stored.client.log_metric(made.info.run_id, name, value, timestamp=START_MS, step=run.steps)
    return str(made.info.run_id)


PACKED = StoredRun("packed", cost=4.0, computed=1.6e6, valid=1.6e6, trained=1.5e6, effective=1.6e6)
GROUPED = StoredRun("grouped", cost=4.8, computed=2e6, valid=1.6e6, trained=1.5e6, effective=1.2e6)
UNPRICED = StoredRun("unpriced", computed=2e6, valid=2e6, effective=2e6, currency=None, price=None)


def correct(run: str, total: str, *options: str) -> int:
    return main(["correct", run, "--total", total, "--by", "finance", *options])


def lines(stored: Stored) -> dict[str, RankedRun]:
    return {line.run_name: line for line in rank(MlflowReader(stored.uri).runs())}


def test_the_newest_invoice_counts_and_everything_before_it_is_kept(
    stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    packed, _ = stored_run(stored, PACKED), stored_run(stored, GROUPED)
    assert [lines(stored)[name].rank for name in ("packed", "grouped")] == [1, 2]
    assert correct(packed, "9.60 CNY", "--note", "INV-7") == 0
    assert correct(packed, "8.00 CNY", "--note", "credit note to INV-7") == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1:] for line in listed[-2:]] == [
        ["9.60 CNY", "finance", "INV-7"],
        ["8.00 CNY", "finance", "credit note to INV-7"],
    ]
    line = lines(stored)["packed"]
    # 8.00 CNY for 1.6 M tokens: 5 a million, behind 4.8 / 1.2 = 4.
    assert (line.rank, line.cost_total, line.cost_per_million) == (2, 8.0, 5.0)
    assert (line.cost_logged, line.corrected_by) == (4.0, "finance")
    assert line.correction_note == "credit note to INV-7"
    assert lines(stored)["grouped"].cost_logged is None
    run = stored.client.get_run(packed)
    assert run.data.metrics["cost/total"] == 4.0
    assert len([key for key in run.data.tags if key.startswith(TAG_PREFIX)]) == 2


def test_an_invoice_gives_a_cost_to_a_run_without_a_price(stored: Stored) -> None:
    run = stored_run(stored, UNPRICED)
    assert lines(stored)["unpriced"].rank is None
    assert correct(run, "4,812.40 usd") == 0
    line = lines(stored)["unpriced"]
    # 4,812.40 USD for 2 M tokens.
    assert (line.rank, line.currency, line.cost_total, line.cost_per_million) == (1, "USD", 4812.4, 2406.2)
    assert line.cost_logged is None


def test_a_clock_that_was_wrong_does_not_hide_a_later_correction(stored: Stored) -> None:
    run = stored_run(stored, PACKED)
    future = {"schema": 1, "total": "9", "currency": "CNY", "by": "a", "note": ""}
    text = json.dumps({**future, "time": "2099-01-01T00:00:00.000000+00:00"})
    stored.client.set_tag(run, f"{TAG_PREFIX}20990101000000000000.00000000", text)
    assert correct(run, "8 CNY") == 0
    assert lines(stored)["packed"].cost_total == 8.0


def test_the_exact_amount_is_kept(stored: Stored) -> None:
    run = stored_run(stored, UNPRICED)
    assert correct(run, "123456789012345678.12 CNY") == 0
    (made,) = corrections_of(stored.client.get_run(run).data.tags)
    assert str(made.total) == "123456789012345678.12"


@pytest.mark.parametrize("total", ["4812.40", "USD 5", "-5 USD", "0 USD", "5 US", "1,23 USD", "nan USD", ""])
def test_what_is_no_invoice(stored: Stored, capsys: pytest.CaptureFixture[str], total: str) -> None:
    run = stored_run(stored, PACKED)
    assert correct(run, total) == 2
    assert 'as in "4812.40 USD"' in capsys.readouterr().err
    assert lines(stored)["packed"].cost_logged is None


def test_what_cannot_be_corrected_is_said(stored: Stored, capsys: pytest.CaptureFixture[str]) -> None:
    run = stored_run(stored, PACKED)
    assert correct(run, "5 USD") == 2
    assert "billed in CNY" in capsys.readouterr().err
    assert correct("0" * 32, "5 CNY") == 2
    assert "could not be corrected" in capsys.readouterr().err
    plain = stored.client.create_run("0").info.run_id
    assert correct(plain, "5 CNY") == 2
    assert "not logged by mlflow_tokens" in capsys.readouterr().err
    assert main(["correct", run, "--total", "5 CNY", "--by", " "]) == 2
    assert main(["correct", run, "--total", "5 CNY", "--by", "x", "--note", "n" * 2001]) == 2


GOOD = {"schema": 1, "total": "1", "currency": "CNY", "by": "a", "note": ""}
GOOD |= {"time": "2026-12-01T10:00:00+00:00"}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "7", "null", '{"schema": 1}']
    + [
        json.dumps({**GOOD, **wrong})
        for wrong in (
            {"total": "x"},
            {"total": "-1"},
            {"total": "NaN"},
            {"total": 1.5},
            {"currency": "<b>"},
            {"time": "yesterday"},
            {"schema": 2},
        )
    ],
)
def test_a_tag_that_is_no_correction_changes_nothing(stored: Stored, text: str) -> None:
    run = stored_run(stored, PACKED)
    stored.client.set_tag(run, f"{TAG_PREFIX}x", text)
    line = lines(stored)["packed"]
    assert (line.cost_total, line.cost_logged) == (4.0, None)


def test_the_command_shows_what_was_corrected(stored: Stored, capsys: pytest.CaptureFixture[str]) -> None:
    run = stored_run(stored, PACKED)
    assert correct(run, "8 CNY", "--note", "[red]INV-7") == 0
    assert main(["compare", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out.partition("\n")[2])["runs"]
    assert (listed["cost_total"], listed["cost_logged"]) == (8.0, 4.0)
    assert main(["compare"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "8*" in shown
    assert "* packed: by invoice, finance," in shown
    assert "[red]INV-7; 4 CNY was logged" in shown
    assert list(mlflow_tokens.compare()["cost_logged"]) == [4.0]


def test_a_job_that_goes_on_keeps_its_corrections(stored: Stored, tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        tracker = mlflow_tokens.Tracker(price="3600 CNY/device-hour")
        tracker.count(computed=10, valid=10)
        tracker.step()
        assert correct(run.info.run_id, "8 CNY") == 2  # nothing of ours is there yet
        tracker.close()
        assert correct(run.info.run_id, "8 CNY") == 0
        tracker = mlflow_tokens.Tracker(price="3600 CNY/device-hour")
        tracker.count(computed=10, valid=10)
        tracker.step()
        tracker.close()
    (line,) = rank(MlflowReader(stored.uri).runs())
    assert (line.cost_total, line.tokens_computed) == (8.0, 20)
