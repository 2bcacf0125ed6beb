"""The tracker by hand, with no framework, into a real store."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from pathlib import Path

import mlflow
import numpy as np
import pytest

import mlflow_tokens
from mlflow_tokens.account import account_of
from mlflow_tokens.comparison.mlflow_reader import MlflowReader
from mlflow_tokens.comparison.table import rank
from mlflow_tokens.journal import read_journal
from mlflow_tokens.ledger import replay
from mlflow_tokens.records import Quantities, RunBound, SegmentEnd
from mlflow_tokens.snapshot import Point, Snapshot
from tests.conftest import Stored


def test_counts_given_by_hand(stored: Stored) -> None:
    with mlflow_tokens.Tracker(price="3.6 USD/device-hour") as tracker:
        assert mlflow_tokens.current() is tracker
        for _ in range(25):
            tracker.count(computed=400, valid=160, trained=100)
            tracker.count(computed=400, valid=160, trained=100)
            tracker.step()
    assert mlflow_tokens.current() is None
    run = stored.only_run()
    assert run.info.status == "FINISHED"
    assert stored.points("tokens/computed") == [(10, 8000), (20, 16000), (25, 20000)]
    assert stored.points("tokens/effective") == [(10, 3200), (20, 6400), (25, 8000)]
    metrics = run.data.metrics
    assert (metrics["tokens/valid"], metrics["tokens/trained"]) == (8000, 5000)
    # 0.001 USD a second, from the start of the process on.
    assert metrics["cost/total"] == pytest.approx(metrics["device/hours"] * 3.6)
    assert metrics["cost/per_million_tokens"] == pytest.approx(metrics["cost/total"] / 8000 * 1e6)
    assert metrics["cost/per_million_computed_tokens"] == pytest.approx(metrics["cost/total"] / 20000 * 1e6)
    tags = run.data.tags
    assert tags["mlflow_tokens.schema"] == "1"
    assert (tags["mlflow_tokens.currency"], tags["mlflow_tokens.price"]) == ("USD", "3.6 USD/device-hour")


def test_batches_of_numpy_arrays(stored: Stored) -> None:
    ids = np.array([[5, 6, 0, 0], [5, 6, 7, 8]])
    with mlflow_tokens.Tracker(pad_token_id=0) as tracker:
        for _ in range(3):
            tracker.count({"input_ids": ids, "labels": np.where(ids == 0, -100, ids)})
            tracker.step()
    metrics = stored.metrics()
    assert [metrics[f"tokens/{kind}"] for kind in ("computed", "valid", "trained", "effective")] == [
        24,
        18,
        18,
        18,
    ]


def test_without_a_price_there_are_no_costs_and_one_line_says_how_to_give_one(
    stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    with mlflow_tokens.Tracker() as tracker:
        tracker.count(computed=8, valid=8)
        tracker.step()
    assert not [name for name in stored.metrics() if name.startswith("cost/")]
    assert stored.metrics()["tokens/computed"] == 8
    advice = [line for line in capsys.readouterr().err.splitlines() if "price" in line]
    assert len(advice) == 1
    assert "price='2.0 USD/device-hour'" in advice[0]


@pytest.mark.parametrize(
    ("counts", "logged"),
    [
        ({"computed": np.int64(16), "valid": np.int32(9)}, {"computed": 192, "valid": 108, "effective": 108}),
        (
            {"computed": 0, "valid": 0, "trained": 0},
            {"computed": 0, "valid": 0, "trained": 0, "effective": 0},
        ),
        ({"valid": 3}, {"valid": 36, "effective": 36}),
        ({"computed": 16.0}, {}),
        ({"computed": "16"}, {}),
        ({"computed": True}, {}),
        ({"computed": -5}, {}),
        ({"computed": 10, "valid": 20}, {}),
        ({"computed": 10, "trained": 11}, {}),
    ],
)
def test_counts_by_hand_are_whole_numbers_or_unknown(
    stored: Stored, capsys: pytest.CaptureFixture[str], counts: dict[str, object], logged: dict[str, int]
) -> None:
    with mlflow_tokens.Tracker() as tracker:
        for _ in range(12):
            tracker.count(**counts)  # type: ignore[arg-type]
            tracker.step()
    metrics = stored.metrics()
    kinds = ("computed", "valid", "trained", "effective")
    tokens = {kind: metrics[f"tokens/{kind}"] for kind in kinds if f"tokens/{kind}" in metrics}
    assert tokens == logged
    assert capsys.readouterr().err.count("Counting failed") == (not logged)


def test_silent_prints_nothing(stored: Stored, capsys: pytest.CaptureFixture[str]) -> None:
    with mlflow_tokens.Tracker(silent=True) as tracker:
        tracker.count(object())
        tracker.step()
    assert "mlflow_tokens" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"price": "two dollars"}, "Valid prices"),
        ({"log_every_steps": 0}, "log_every_steps=0"),
        ({"log_every_steps": 2.5}, "log_every_steps=2.5"),
        ({"pad": "left"}, "pad='left'"),
        ({"pad": "none", "pad_token_id": 0}, "leave pad_token_id out"),
        ({"pad_token_id": "[PAD]"}, "pad_token_id="),
        ({"ignore_index": None}, "ignore_index=None"),
    ],
)
def test_an_option_that_cannot_be_used_is_an_error_at_once(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mlflow_tokens.Tracker(**options)  # type: ignore[arg-type]
    assert mlflow_tokens.current() is None


def test_the_run_that_is_active_at_the_first_snapshot_is_used_and_left_to_its_owner(stored: Stored) -> None:
    tracker = mlflow_tokens.Tracker()
    with mlflow.start_run(run_name="mine") as run:
        for _ in range(10):
            tracker.count(computed=1, valid=1)
            tracker.step()
        tracker.close()
        assert stored.client.get_run(run.info.run_id).info.status == "RUNNING"
    assert stored.only_run().info.run_id == run.info.run_id
    assert stored.only_run().info.status == "FINISHED"
    assert stored.metrics()["tokens/computed"] == 10


def test_the_run_is_bound_once_whatever_is_active_later(stored: Stored) -> None:
    tracker = mlflow_tokens.Tracker(log_every_steps=1)

    def train(steps: int) -> None:
        for _ in range(steps):
            tracker.count(computed=1, valid=1)
            tracker.step()

    with mlflow.start_run(run_name="outer") as outer:
        train(2)
        with mlflow.start_run(run_name="inner", nested=True) as inner:
            train(2)
        train(1)
        tracker.close()
    # The final point repeats the last one; MLflow drops it if both fall into one millisecond.
    assert set(stored.points("tokens/computed", outer.info.run_id)) == {(step, step) for step in range(1, 6)}
    assert stored.client.get_metric_history(inner.info.run_id, "tokens/computed") == []


def test_a_run_started_by_us_does_not_stand_in_the_way_of_the_scripts_own(stored: Stored) -> None:
    with mlflow_tokens.Tracker(log_every_steps=1) as tracker:
        tracker.count(computed=1)
        tracker.step()
        with mlflow.start_run(run_name="later"):
            mlflow.log_metric("loss", 1.0)
    assert sorted(run.data.metrics.keys() >= {"tokens/computed"} for run in stored.runs()) == [False, True]
    assert {run.info.status for run in stored.runs()} == {"FINISHED"}


@pytest.mark.parametrize(("error", "status"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_an_exception_passes_through_and_ends_our_run_accordingly(
    stored: Stored, error: type[BaseException], status: str
) -> None:
    with pytest.raises(error), mlflow_tokens.Tracker() as tracker:
        tracker.count(computed=8, valid=8)
        tracker.step()
        tracker.count(computed=8, valid=8)
        raise error
    assert stored.only_run().info.status == status
    assert stored.metrics()["tokens/computed"] == 8  # the step that did not end does not count


def test_a_total_that_becomes_unknown_is_not_left_at_its_last_known_value(stored: Stored) -> None:
    with mlflow_tokens.Tracker(price="2 USD/device-hour") as tracker:
        for step in range(30):
            tracker.count(computed=16, valid=16 if step != 15 else None, trained=16)
            tracker.step()
    metrics = stored.metrics()
    assert (metrics["tokens/computed"], metrics["tokens/trained"]) == (480, 480)
    for name in ("tokens/valid", "tokens/effective", "cost/per_million_tokens"):
        assert math.isnan(metrics[name])
        values = [value for _, value in stored.points(name)]
        assert [math.isnan(value) for value in values] == [False, True]  # at 10 and 20, and no more
    (line,) = rank(MlflowReader(stored.uri).runs())
    assert (line.rank, line.cost_per_million, line.tokens_effective, line.tokens_computed) == (
        None,
        None,
        None,
        480,
    )


def test_the_final_figures_do_not_wait_for_a_backlog(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow_tokens.sinks.mlflow import MlflowSink

    write, began, go_on = MlflowSink.write, threading.Event(), threading.Event()
    written: list[int] = []

    def slow(sink: MlflowSink, snapshots: list[Snapshot], skip: frozenset[Point]) -> None:
        began.set()
        assert go_on.wait(60)
        write(sink, snapshots, skip)
        written.extend(snapshot.step for snapshot in snapshots)

    monkeypatch.setattr(MlflowSink, "write", slow)
    tracker = mlflow_tokens.Tracker(log_every_steps=1)
    for _ in range(150):
        tracker.count(computed=1, valid=1)
        tracker.step()
    assert began.wait(60)
    threading.Timer(0.2, go_on.set).start()
    tracker.close()
    assert sorted(written) == [*range(1, 151), 150]
    # Behind what was being written when the run ended comes the final snapshot, before the rest.
    behind = written[written.index(150) :]
    assert written.index(150) <= 64 and len(behind) > 64
    assert {step for step, _ in stored.points("tokens/computed")} == set(range(1, 151))


def test_evaluation_time_is_told_apart(stored: Stored) -> None:
    with mlflow_tokens.Tracker() as tracker:
        tracker.count(computed=1000, valid=1000)
        tracker.step()
        with tracker.phase("eval"):
            deadline = tracker.meter.clock.seconds()["train"] + 0.2
            while tracker.meter.clock.seconds()["eval"] < deadline:
                pass
    seconds = tracker.meter.clock.seconds()
    assert seconds["eval"] >= 0.2
    busy = seconds["train"] + seconds["data_wait"]
    assert stored.metrics()["throughput/tokens_per_second_average"] >= 1000 / busy * 0.999


def test_the_journal_holds_the_run_and_folds_to_what_was_logged(stored: Stored, tmp_path: Path) -> None:
    with mlflow_tokens.Tracker(price="1 CNY/device-hour", journal_dir=tmp_path / "kept") as tracker:
        for _ in range(12):
            tracker.count(computed=100, valid=70, trained=60)
            tracker.step()
    (path,) = (tmp_path / "kept").glob("*.jsonl")
    records = list(read_journal(path))
    names = [type(record).__name__ for record in records]
    assert names[0] == "RunBound" and names.index("SegmentStart") < names.index("PriceSet")
    run = stored.only_run().info.run_id
    assert path.stem == run
    assert [record.run for record in records if isinstance(record, RunBound)] == [None, run]
    assert [record.tokens["computed"] for record in records if isinstance(record, Quantities)] == [1000, 1200]
    assert [record.status for record in records if isinstance(record, SegmentEnd)] == ["FINISHED"]
    account = account_of(records)
    assert account.cost is not None
    assert float(account.cost) == pytest.approx(stored.metrics()["cost/total"], rel=1e-9)


def test_a_journal_that_cannot_be_written_costs_a_line_not_the_run(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a directory")
    with mlflow_tokens.Tracker(journal_dir=tmp_path / "file") as tracker:
        tracker.count(computed=8)
        tracker.step()
    assert stored.metrics()["tokens/computed"] == 8
    assert capsys.readouterr().err.count("No journal can be kept") == 1


def test_the_state_for_a_checkpoint_names_run_segment_and_step(stored: Stored) -> None:
    with mlflow.start_run() as run:
        tracker = mlflow_tokens.Tracker(log_every_steps=2)
        for _ in range(3):
            tracker.count(computed=1)
            tracker.step()
        state = tracker.state_dict()
        tracker.close()
    point = {"position": 3, "timestamp_ms": state["timestamp_ms"]}
    assert state == {"schema": 1, "run": run.info.run_id, "segment": state["segment"], "step": 3} | point
    assert len(state["segment"]) == 32
    # It names a point that MLflow has.
    history = stored.client.get_metric_history(run.info.run_id, "tokens/computed")
    assert [p.value for p in history if (p.step, p.timestamp) == (3, state["timestamp_ms"])] == [3]


def test_a_batch_that_nobody_understands_makes_the_totals_unknown_with_one_line(
    stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    class Hostile:
        shape = property(lambda self: 1 / 0)
        dtype = "int64"

    with mlflow_tokens.Tracker(price="2 USD/device-hour") as tracker:
        for _ in range(12):
            tracker.count({"input_ids": Hostile()})
            tracker.step()
    assert not [name for name in stored.metrics() if name.startswith("tokens/")]
    assert "cost/total" in stored.metrics()
    assert capsys.readouterr().err.count("Counting failed") == 1


def test_importing_the_package_imports_no_framework() -> None:
    script = (
        "import sys, mlflow_tokens\n"
        "unwanted = ('paddle', 'mlflow', 'visualdl', 'dash', 'pynvml', 'numpy')\n"
        "print([name for name in unwanted if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "module", ["counting", "clock", "journal", "account", "pricing", "metrics", "meter", "ranks"]
)
def test_the_core_imports_neither_paddle_nor_mlflow(module: str) -> None:
    script = (
        f"import sys, mlflow_tokens.{module}\n"
        "print([name for name in ('paddle', 'mlflow', 'visualdl') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_journal_read_again_gives_the_points_that_were_logged(stored: Stored, tmp_path: Path) -> None:
    with mlflow_tokens.Tracker(
        price="1 CNY/device-hour", journal_dir=tmp_path / "kept", log_every_steps=5
    ) as tracker:
        for _ in range(23):
            tracker.count(computed=100, valid=70, trained=60)
            tracker.step()
    (path,) = (tmp_path / "kept").glob("*.jsonl")
    again = {
        (name, snapshot.timestamp_ms, snapshot.position, float(value))
        for snapshot in replay(read_journal(path))
        for name, value in snapshot.metrics.items()
    }
    logged = {
        (point.key, point.timestamp, point.step, point.value)
        for name in stored.metrics()
        for point in stored.client.get_metric_history(stored.only_run().info.run_id, name)
    }
    assert again == logged
