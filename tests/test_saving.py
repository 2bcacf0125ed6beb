"""Seconds of saving go to the phase `checkpoint`, whoever saves and by which name."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn

import mlflow_tokens
from tests.conftest import Stored


class Slow:
    """Takes 50 ms to be saved."""

    def __reduce__(self) -> Any:
        time.sleep(0.05)
        return (Slow, ())


@pytest.fixture
def tracker(store: str) -> mlflow_tokens.Tracker:
    tracker = mlflow_tokens.autolog(pad="none", price="3600 USD/device-hour")
    assert tracker is not None
    return tracker


def train(steps: int = 1) -> None:
    model = nn.Linear(4, 4)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    for _ in range(steps):
        model(paddle.ones([2, 4])).mean().backward()
        optimizer.step()
        optimizer.clear_grad()


@pytest.mark.parametrize("name", ["paddle", "paddle.framework", "paddle.framework.io"])
def test_saving_between_steps_is_a_checkpoint(
    tracker: mlflow_tokens.Tracker, tmp_path: Path, name: str
) -> None:
    import importlib

    save = vars(importlib.import_module(name))["save"]
    tracker.trains()
    save({"slow": Slow()}, str(tmp_path / "a.pdparams"))
    assert tracker.meter.clock.phase == "train"
    seconds = tracker.meter.clock.seconds()
    assert seconds["checkpoint"] >= 0.05
    assert paddle.load(str(tmp_path / "a.pdparams")).keys() == {"slow"}


def test_saving_on_another_thread_holds_nobody_up(tracker: mlflow_tokens.Tracker, tmp_path: Path) -> None:
    tracker.trains()
    thread = threading.Thread(target=paddle.save, args=({"slow": Slow()}, str(tmp_path / "a.pdparams")))
    thread.start()
    thread.join()
    assert tracker.meter.clock.seconds()["checkpoint"] == 0


def test_a_save_that_fails_raises_what_paddle_raises_and_training_goes_on(
    tracker: mlflow_tokens.Tracker, tmp_path: Path
) -> None:
    tracker.trains()
    with pytest.raises(ValueError, match="path"):
        paddle.save({}, str(tmp_path) + "/")
    assert tracker.meter.clock.phase == "train"


def test_what_checkpoints_cost_is_logged_and_everything_is_put_back(stored: Stored, tmp_path: Path) -> None:
    before = paddle.save
    mlflow_tokens.autolog(pad="none", price="3600 USD/device-hour")
    ids = paddle.ones([2, 4], dtype="int64")
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    for _ in range(3):
        model(ids).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        paddle.save({"slow": Slow()}, str(tmp_path / "a.pdparams"))
    mlflow_tokens.autolog(disable=True)
    assert paddle.save is before
    # A USD a second: three times 50 ms and more.
    assert stored.metrics()["cost/phase/checkpoint"] >= 0.15
