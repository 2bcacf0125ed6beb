"""`autolog()` and the runs of a script: which run is logged to, at which steps, and how it is turned off."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlflow
import paddle
import pytest
from mlflow import MlflowClient
from paddle import nn
from paddle.nn import functional as F

import mlflow_tokens
from mlflow_tokens.clock import process_started
from tests.conftest import Stored
from tests.loops import PAD, Model, Recount, dataset, outside, train


def test_the_scripts_random_numbers_are_its_own(stored: Stored) -> None:
    """MLflow names a run with Python's global generator: also when it does so for us, in the background."""

    def run() -> list[float]:
        random.seed(5)
        train(outside, dataset(12))
        drawn = [random.random()]
        mlflow_tokens.autolog(disable=True)
        return [*drawn, random.random()]

    without = run()
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=1)
    assert run() == without
    assert len(stored.runs()) == 1
    # The script's own use of MLflow draws what it always drew.
    random.seed(5)
    MlflowClient().create_run("0")
    after_a_name = random.random()
    random.seed(5)
    assert random.random() != after_a_name


def test_each_run_of_a_sweep_in_one_process_has_its_own_totals(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD, price="2 USD/device-hour")
    recounts = []
    for seed in range(3):
        with mlflow.start_run():
            recounts.append(train(outside, dataset(12, seed=seed))[0])
    mlflow_tokens.autolog(disable=True)
    runs = stored.runs()
    assert len(runs) == 3
    for run, recount in zip(runs, recounts, strict=True):
        assert recount.equals(run.data.metrics)
        assert [step for step, _ in stored.points("tokens/computed", run.info.run_id)] == [10, 12]
    # The time between two runs is charged to the later one: no second is charged twice.
    hours = sum(run.data.metrics["device/hours"] for run in runs)
    tracker_hours = sum(run.data.metrics["cost/total"] for run in runs) / 2
    assert hours == pytest.approx(tracker_hours)


def test_micro_batches_of_a_step_that_never_ended_are_not_the_next_runs(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    recounts = []
    for seed in range(2):
        batches = dataset(13, seed=seed)
        with mlflow.start_run():
            train(outside, batches, accumulate=4)  # 3 steps, and a micro-batch that is left over
        recounts.append(Recount())
        for ids, labels in batches[:12]:
            recounts[-1].add(ids, labels)
    mlflow_tokens.autolog(disable=True)
    for run, recount in zip(stored.runs(), recounts, strict=True):
        assert recount.equals(run.data.metrics)


def test_autolog_for_every_run_charges_no_second_twice(stored: Stored) -> None:
    for seed in range(3):
        mlflow_tokens.autolog(pad_token_id=PAD, price="3600 USD/device-hour")
        with mlflow.start_run():
            train(outside, dataset(3, seed=seed))
    mlflow_tokens.autolog(disable=True)
    held = time.monotonic() - process_started()
    assert 0 < sum(run.data.metrics["cost/total"] for run in stored.runs()) <= held


def test_autolog_again_within_one_run_goes_on_from_its_totals(stored: Stored) -> None:
    recounts = []
    with mlflow.start_run():
        for seed in range(2):  # two cells of a notebook
            mlflow_tokens.autolog(pad_token_id=PAD, price="2 USD/device-hour")
            recounts.append(train(outside, dataset(12, seed=seed))[0])
        mlflow_tokens.autolog(disable=True)
    first, second = recounts
    metrics = stored.metrics()
    assert metrics["tokens/computed"] == first.computed + second.computed
    assert metrics["tokens/trained"] == first.trained + second.trained
    points = stored.points("tokens/computed")
    assert {step for step, _ in points} == {10, 12, 22, 24}
    assert points == sorted(points)
    costs = [value for _, value in stored.points("cost/total")]
    assert costs == sorted(costs)


def test_training_before_the_scripts_first_run_is_not_the_scripts_run(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    model = Model()
    warm_up = train(outside, dataset(12), model=model)[0]  # without a run
    recounts = {}
    for seed in (1, 2):
        with mlflow.start_run() as run:
            recounts[run.info.run_id] = train(outside, dataset(11, seed=seed), model=model)[0]
    mlflow_tokens.autolog(disable=True)
    runs = stored.runs()
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert len(runs) == 3
    for run in runs:
        assert recounts.get(run.info.run_id, warm_up).equals(run.data.metrics)


def test_a_server_that_is_away_leaves_the_random_numbers_alone_too(stored: Stored) -> None:
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    random.seed(5)
    before = random.getstate()
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=1, silent=True)
    recount, _ = train(outside, dataset(12))
    began = time.monotonic()
    mlflow_tokens.autolog(disable=True)
    assert time.monotonic() - began < 15  # 5 s for the sink, and what a busy machine adds
    assert random.getstate() == before
    assert recount.computed > 0


def test_a_run_of_fewer_steps_than_the_interval_still_has_its_totals(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    with mlflow.start_run() as run:
        recount, _ = train(outside, dataset(3))
    assert stored.only_run().info.run_id == run.info.run_id
    assert recount.equals(stored.metrics())


def test_ours_are_logged_at_the_steps_at_which_the_script_logs(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=2)
    model = Model()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    with mlflow.start_run():
        for index, (ids, labels) in enumerate(dataset(20)):
            loss = outside(model, paddle.to_tensor(ids), paddle.to_tensor(labels))
            loss.backward()
            optimizer.step()
            if index % 5 == 0:
                mlflow.log_metrics({"loss": float(loss), "lr": 0.01}, step=index)
    losses = {step for step, _ in stored.points("loss")}
    ours = [step for step, _ in stored.points("tokens/computed")]
    assert losses == {0, 5, 10, 15}
    assert losses <= set(ours)
    assert ours == sorted(ours)
    assert ours[-1] == 19  # the last step, counted from 0 as the script does


@pytest.mark.parametrize("imported", ["before", "after"])
def test_ours_are_logged_at_the_steps_at_which_the_script_writes_to_visualdl(
    stored: Stored, tmp_path: Path, imported: str
) -> None:
    lines = ["import sys, numpy, mlflow_tokens", "mlflow_tokens.autolog(pad_token_id=0, log_every_steps=2)"]
    lines.insert(1 if imported == "before" else 2, "import visualdl")
    lines += [
        "assert sys.modules['visualdl']",
        "tracker, log = mlflow_tokens.current(), visualdl.LogWriter('log')",
        "for step in range(16):",
        "    tracker.count(computed=4, valid=4)",
        "    tracker.step()",
        "    if step % 5 == 0:",
        "        log.add_scalar('loss', 1.0, step)",
    ]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    script = "\n".join(lines)
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environ, check=True, timeout=120)
    assert {5, 10, 15} <= {step for step, _ in stored.points("tokens/computed")}


def test_a_script_that_logs_without_a_run_joins_ours(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=2)
    model = Model()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    for index, (ids, labels) in enumerate(dataset(20), start=1):
        loss = outside(model, paddle.to_tensor(ids), paddle.to_tensor(labels))
        loss.backward()
        optimizer.step()
        if index % 10 == 0:
            mlflow.log_metric("loss", float(loss), step=index)
    mlflow_tokens.autolog(disable=True)
    mlflow.end_run()
    assert [step for step, _ in stored.points("loss")] == [10, 20]
    assert {10, 20} <= {step for step, _ in stored.points("tokens/computed")}
    assert stored.only_run().info.status == "FINISHED"


def test_disable_takes_every_hook_out(stored: Stored) -> None:
    from mlflow.tracking import fluent

    owners = [
        sys,
        mlflow,
        fluent,
        paddle.Tensor,
        paddle.autograd,
        paddle,
        F,
        nn.Layer,
        MlflowClient,
        paddle.optimizer.Optimizer,
        paddle.optimizer.Adam,
    ]
    owners += [paddle.optimizer.AdamW, paddle.optimizer.LBFGS, paddle.incubate.optimizer.LookAhead]
    before = [dict(vars(owner)) for owner in owners]
    mlflow_tokens.autolog()
    assert [dict(vars(owner)) for owner in owners] != before
    model = Model()
    train(outside, dataset(3), model=model)
    assert model._forward_pre_hooks
    mlflow_tokens.autolog(disable=True)
    assert [dict(vars(owner)) for owner in owners] == before
    assert not model._forward_pre_hooks
    assert mlflow_tokens.current() is None
    train(outside, dataset(3), model=model)
    assert len(stored.runs()) == 1


def test_mlflows_own_switch_turns_us_off(stored: Stored) -> None:
    before = dict(vars(nn.Layer))
    mlflow_tokens.autolog(pad_token_id=PAD)
    recount, _ = train(outside, dataset(3))
    mlflow.autolog(disable=True)
    train(outside, dataset(3))
    assert mlflow_tokens.current() is None
    assert dict(vars(nn.Layer)) == before
    assert stored.metrics()["tokens/computed"] == recount.computed


def test_it_follows_mlflows_conventions(stored: Stored) -> None:
    from mlflow.utils.autologging_utils import autologging_is_disabled, get_autologging_config

    tracker = mlflow_tokens.autolog(price="2 USD/device-hour", silent=True)
    assert tracker is mlflow_tokens.current()
    assert not autologging_is_disabled("mlflow_tokens")
    assert get_autologging_config("mlflow_tokens", "price") == "2 USD/device-hour"
    assert get_autologging_config("mlflow_tokens", "silent") is True
    assert mlflow_tokens.autolog(disable=True) is None
    assert autologging_is_disabled("mlflow_tokens")


def test_a_bad_option_is_an_error_at_once_and_leaves_the_running_one_alone(stored: Stored) -> None:
    tracker = mlflow_tokens.autolog(pad_token_id=PAD)
    with pytest.raises(ValueError, match="Valid prices"):
        mlflow_tokens.autolog(price="cheap")
    assert mlflow_tokens.current() is tracker
    recount, _ = train(outside, dataset(3))
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())


def test_visualdl_gets_the_same_scalars_and_a_sidecar_with_exact_integers(
    stored: Stored, tmp_path: Any
) -> None:
    import json

    from visualdl import LogReader

    mlflow_tokens.autolog(
        pad_token_id=PAD, log_every_steps=2, visualdl=tmp_path / "vdl", price="2 CNY/device-hour"
    )
    recount, _ = train(outside, dataset(21))
    mlflow_tokens.autolog(disable=True)
    # What our own sinks write is not taken for the script's own logging.
    assert [step for step, _ in stored.points("tokens/computed")] == [*range(2, 21, 2), 21]
    (records,) = (tmp_path / "vdl" / "tokens").glob("*vdlrecords*")
    reader = LogReader(file_path=str(records))
    assert set(reader.get_tags()["scalar"]) == set(stored.metrics())
    points = [(point.id, point.value) for point in reader.get_data("scalar", "tokens/computed")]
    assert points == stored.points("tokens/computed")
    sidecar = json.loads((tmp_path / "vdl" / "tokens" / "mlflow_tokens.json").read_text("utf-8"))
    assert sidecar["counts"]["tokens/computed"] == recount.computed
    assert sidecar["tags"]["mlflow_tokens.currency"] == "CNY"
