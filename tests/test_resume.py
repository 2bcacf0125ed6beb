"""Resuming in a real store: the same run, a child of it, with and without the journal.

Every step has 10 computed and 8 valid tokens; steps are counted by hand.
"""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import mlflow
import pytest

import mlflow_tokens
from mlflow_tokens.account import account_of
from mlflow_tokens.journal import read_journal
from mlflow_tokens.records import Quantities
from tests.conftest import Stored


def start(journals: Path, **options: Any) -> mlflow_tokens.Tracker:
    return mlflow_tokens.Tracker(
        price="2 USD/device-hour", log_every_steps=10, journal_dir=journals, **options
    )


def steps(tracker: mlflow_tokens.Tracker, count: int) -> None:
    for _ in range(count):
        tracker.count(computed=10, valid=8, trained=7)
        tracker.step()


def crash_at_35(journals: Path, **options: Any) -> dict[str, Any]:
    """Train 35 steps, save a checkpoint at 20, end; what the checkpoint carries."""
    tracker = start(journals, **options)
    steps(tracker, 20)
    state = tracker.state_dict()
    steps(tracker, 15)
    tracker.close("FAILED")
    return state


def check_totals(metrics: dict[str, float], trained_steps: int, surviving_steps: int) -> None:
    assert metrics["tokens/computed"] == 10 * trained_steps
    assert metrics["tokens/valid"] == 8 * trained_steps
    assert metrics["tokens/trained"] == 7 * trained_steps
    assert metrics["tokens/effective"] == 8 * surviving_steps


def test_the_run_of_the_checkpoint_is_continued_where_none_is_active(stored: Stored, tmp_path: Path) -> None:
    state = crash_at_35(tmp_path)
    tracker = start(tmp_path)
    tracker.load_state_dict(json.loads(json.dumps(state)))
    steps(tracker, 5)
    tracker.close()
    # The steps from 21 on were trained twice, the last ten of them have not come back.
    check_totals(stored.metrics(), 35 + 5, 20 + 5)
    assert stored.only_run().info.status == "FINISHED"
    (path,) = tmp_path.glob("*.jsonl")
    account = account_of(read_journal(path))
    assert account.cost is not None
    assert stored.metrics()["cost/total"] == pytest.approx(float(account.cost), rel=1e-9)
    assert stored.metrics()["cost/waste/rolled_back"] > 0
    assert stored.metrics()["cost/phase/restart"] > 0
    # Below the high-water step totals are logged there: it is the latest, and the curve does not go back.
    points = stored.points("tokens/effective")
    assert points[-1] == (35, 8 * 25)
    assert [position for position, _ in points] == sorted(position for position, _ in points)
    assert (20, 8 * 20) in points and (35, 8 * 35) in points


def test_the_same_run_started_by_the_script(stored: Stored, tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        state = crash_at_35(tmp_path)
    with mlflow.start_run(run_id=run.info.run_id):
        tracker = start(tmp_path)
        tracker.load_state_dict(state)
        steps(tracker, 30)
        assert tracker.state_dict()["step"] == 50
        tracker.close()
    check_totals(stored.metrics(), 35 + 30, 50)
    assert {position for position, _ in stored.points("tokens/computed")} == {10, 20, 30, 35, 40, 50}


def test_another_run_becomes_the_child_of_the_checkpoints_run(stored: Stored, tmp_path: Path) -> None:
    with mlflow.start_run() as parent:
        state = crash_at_35(tmp_path)
    with mlflow.start_run() as child:
        tracker = start(tmp_path)
        tracker.load_state_dict(state)
        steps(tracker, 5)
        tracker.close()
    runs = {run.info.run_id: run.data for run in stored.runs()}
    check_totals(runs[parent.info.run_id].metrics, 35, 35)
    # The child has the parent's 20 steps; what the parent trained after the checkpoint is the parent's.
    check_totals(runs[child.info.run_id].metrics, 25, 25)
    assert runs[child.info.run_id].tags["mlflow_tokens.parent_run"] == parent.info.run_id
    checkpoint = stored.client.get_metric_history(parent.info.run_id, "cost/total")
    (paid,) = [p.value for p in checkpoint if (p.step, p.timestamp) == (20, state["timestamp_ms"])]
    assert runs[child.info.run_id].metrics["cost/total"] > paid


@pytest.mark.parametrize("script_run", [True, False])
def test_the_journal_is_gone_and_mlflows_history_is_left(
    stored: Stored, tmp_path: Path, script_run: bool
) -> None:
    if script_run:
        mlflow.start_run()
    state = crash_at_35(tmp_path / "lost")
    before = stored.metrics()
    tracker = start(tmp_path / "new")
    tracker.load_state_dict(state | {"run": stored.only_run().info.run_id})
    steps(tracker, 15)
    tracker.close()
    metrics = stored.metrics()
    check_totals(metrics, 35 + 15, 20 + 15)
    assert metrics["cost/total"] > before["cost/total"]
    assert metrics["device/hours"] > before["device/hours"]
    assert metrics["throughput/tokens_per_second_average"] > 0


def test_the_journal_and_the_checkpoint_say_nothing_but_the_run_has_a_past(
    stored: Stored, tmp_path: Path
) -> None:
    with mlflow.start_run():
        crash_at_35(tmp_path / "lost")
        tracker = start(tmp_path / "new")
        steps(tracker, 10)
        tracker.close()
    check_totals(stored.metrics(), 45, 45)
    assert max(position for position, _ in stored.points("tokens/computed")) >= 35


def test_the_parents_journal_is_gone(stored: Stored, tmp_path: Path) -> None:
    with mlflow.start_run():
        state = crash_at_35(tmp_path / "lost")
    with mlflow.start_run() as child:
        tracker = start(tmp_path / "new")
        tracker.load_state_dict(state)
        steps(tracker, 5)
        tracker.close()
    check_totals(stored.client.get_run(child.info.run_id).data.metrics, 25, 25)


def test_nothing_is_left_of_the_parent_so_totals_are_absent_and_not_too_small(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = crash_at_35(tmp_path / "lost")
    stored.client.delete_run(state["run"] or stored.only_run().info.run_id)
    with mlflow.start_run() as child:
        tracker = start(tmp_path / "new")
        tracker.load_state_dict(state | {"run": "0" * 32})
        steps(tracker, 10)
        tracker.close()
    metrics = stored.client.get_run(child.info.run_id).data.metrics
    known = {name for name, value in metrics.items() if not math.isnan(value)}
    assert not known & {"tokens/computed", "tokens/effective", "cost/total", "device/hours"}
    assert "Nothing is known of the 20 steps" in capsys.readouterr().err


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_the_run_went_on_elsewhere_since_this_journal_was_written(
    stored: Stored, tmp_path: Path, with_checkpoint: bool
) -> None:
    with mlflow.start_run() as run:
        crash_at_35(tmp_path / "a")
    states = []
    for folder, trained in (("b", 10), ("a", 5)):  # on another machine, and back on the first one
        with mlflow.start_run(run_id=run.info.run_id):
            tracker = start(tmp_path / folder)
            if with_checkpoint and states:
                tracker.load_state_dict(states[-1])
            steps(tracker, trained)
            states.append(tracker.state_dict())
            tracker.close()
    check_totals(stored.metrics(), 35 + 10 + 5, 35 + 10 + 5)


def test_a_checkpoint_loaded_in_the_middle_of_a_run(stored: Stored, tmp_path: Path) -> None:
    tracker = start(tmp_path)
    steps(tracker, 20)
    state = tracker.state_dict()
    steps(tracker, 13)
    tracker.load_state_dict(state)  # the loss had become NaN
    steps(tracker, 4)
    second = tracker.state_dict()
    assert (second["step"], second["position"]) == (24, 24)
    steps(tracker, 3)
    tracker.load_state_dict(second)
    steps(tracker, 6)
    tracker.close()
    check_totals(stored.metrics(), 20 + 13 + 4 + 3 + 6, 20 + 4 + 6)


def test_a_checkpoint_saved_before_the_run_had_an_id(stored: Stored, tmp_path: Path) -> None:
    tracker = start(tmp_path)
    steps(tracker, 5)
    state = tracker.state_dict()  # the run is being started in the background
    steps(tracker, 5)
    tracker.close()
    tracker = start(tmp_path)
    tracker.load_state_dict(state | {"run": None})
    steps(tracker, 1)
    tracker.close()
    check_totals(stored.metrics(), 11, 6)


def test_a_second_tracker_on_the_same_run_is_recorded_in_a_run_of_its_own(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mlflow.start_run() as run:
        first, second = start(tmp_path), start(tmp_path)
        steps(first, 10)
        steps(second, 20)
        second.close()
        first.close()
    assert capsys.readouterr().err.count("Another process is recording run") == 1
    runs = {item.info.run_id: item for item in stored.runs()}
    check_totals(runs.pop(run.info.run_id).data.metrics, 10, 10)
    (other,) = runs.values()
    check_totals(other.data.metrics, 20, 20)
    assert other.info.status == "FINISHED"


def test_the_state_survives_what_checkpoints_are_saved_with(stored: Stored, tmp_path: Path) -> None:
    tracker = start(tmp_path)
    steps(tracker, 3)
    state = tracker.state_dict()
    assert json.loads(json.dumps(state)) == pickle.loads(pickle.dumps(state)) == state
    assert tracker.state_dict() == state  # nothing was trained since
    tracker.close()
    assert tracker.state_dict()["step"] == 3


@pytest.mark.parametrize("state", [{}, None, 7, "x", {"schema": 99}, {"schema": 1, "run": "r"}, [1]])
def test_a_state_that_nobody_understands_costs_a_line_at_most(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str], state: Any
) -> None:
    tracker = start(tmp_path)
    tracker.load_state_dict(state)
    steps(tracker, 2)
    tracker.close()
    check_totals(stored.metrics(), 2, 2)
    assert capsys.readouterr().err.count("does not say where it was saved") == bool(state)


def test_a_run_whose_id_never_reached_the_journal_is_gone_on_with(stored: Stored, tmp_path: Path) -> None:
    """Killed while the answer that names the run was on its way."""
    state = crash_at_35(tmp_path)
    run = stored.only_run().info.run_id
    (path,) = tmp_path.glob("*.jsonl")
    nameless = [line for line in path.read_text().splitlines(keepends=True) if run not in line]
    path.with_name(f"{state['segment']}.jsonl").write_text("".join(nameless))
    path.unlink()
    tracker = start(tmp_path)
    tracker.load_state_dict({**state, "run": None})
    steps(tracker, 5)
    tracker.close()
    assert stored.only_run().info.run_id == run
    check_totals(stored.metrics(), 35 + 5, 20 + 5)


def test_a_checkpoint_right_after_the_resume_does_not_put_off_the_next_snapshot(
    stored: Stored, tmp_path: Path
) -> None:
    state = crash_at_35(tmp_path)
    tracker = start(tmp_path)
    tracker.load_state_dict(state)
    steps(tracker, 2)
    tracker.state_dict()
    steps(tracker, 8)
    tracker.close()
    (path,) = tmp_path.glob("*.jsonl")
    records = [record for record in read_journal(path) if isinstance(record, Quantities)]
    assert [(record.kind, record.step) for record in records][-3:] == [
        ("checkpoint", 22),
        ("step", 30),
        ("final", 30),
    ]
