"""What training waits for its data, and what that costs the other ranks."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.profiler.timer import benchmark

import mlflow_tokens
from mlflow_tokens.account import account_of
from mlflow_tokens.aggregate import Moment, Past, quantities
from mlflow_tokens.clock import PHASES, PhaseClock
from mlflow_tokens.meter import Reading
from mlflow_tokens.ranks import Question
from mlflow_tokens.records import Pace, Quantities
from mlflow_tokens.snapshot import derive
from tests.conftest import Stored
from tests.jobs import SCRIPTS, launch
from tests.journals import price, segment
from tests.test_clock import Time


def test_a_wait_is_a_part_of_the_training_it_is_in() -> None:
    now = Time()
    clock = PhaseClock(started=100.0, now=now)
    clock.waited_for_data(3.0)  # before the first step: startup
    clock.switch("train")
    now.now = 110.0
    clock.waited_for_data(4.0)
    now.now = 115.0
    clock.waited_for_data(2.0)
    assert clock.seconds() == dict.fromkeys(PHASES, 0.0) | {"train": 9.0, "data_wait": 6.0}
    clock.mark()
    now.now = 120.0
    clock.waited_for_data(5.0)
    clock.reclassify("eval")  # it was an evaluation's first batch
    now.now = 121.0
    clock.waited_for_data(1.0)
    clock.switch("train")
    assert clock.seconds() == dict.fromkeys(PHASES, 0.0) | {"train": 9.0, "data_wait": 6.0, "eval": 6.0}


class SlowRows(paddle.io.Dataset):  # type: ignore[misc]
    def __init__(self, rows: int, seconds: float) -> None:
        self._rows, self._seconds = rows, seconds

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, number: int) -> list[int]:
        time.sleep(self._seconds)
        return [number % 7 + 1] * 6


def loader(rows: int, seconds: float, workers: int = 0) -> Any:
    return paddle.io.DataLoader(
        SlowRows(rows, seconds), batch_size=1, collate_fn=paddle.to_tensor, num_workers=workers
    )


class Timed:
    """Times every batch of a reader from outside, but not its end."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def around(self, reader: Any) -> Iterator[Any]:
        batches = iter(reader)
        while True:
            began = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.waits.append(time.monotonic() - began)
            yield batch


class Model(nn.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, input_ids: Any) -> Any:
        return self.head(self.embedding(input_ids))


def test_waits_of_training_and_not_of_evaluation_and_not_the_end_of_an_epoch(store: str) -> None:
    tracker = mlflow_tokens.autolog(pad="none")
    assert tracker is not None
    model = Model()
    optimizer = paddle.optimizer.SGD(1e-3, parameters=model.parameters())
    training, evaluation = Timed(), Timed()
    for _ in range(2):
        for ids in training.around(loader(5, 0.02)):
            model(ids).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
        time.sleep(0.2)  # between epochs nobody waits for data
        model.eval()
        with paddle.no_grad():
            for ids in evaluation.around(loader(5, 0.03)):
                model(ids)
        model.train()
    seconds = tracker.meter.clock.seconds()
    # The first batch of all is startup. The reader's own wait is nearly all of what is timed around it.
    waits = sum(training.waits[1:])
    assert waits / 2 <= seconds["data_wait"] <= waits
    assert seconds["eval"] >= sum(evaluation.waits)
    tracker.close()


def test_a_reader_of_another_thread_holds_nobody_up(store: str) -> None:
    from threading import Thread

    tracker = mlflow_tokens.autolog(pad="none")
    assert tracker is not None
    tracker.meter.clock.switch("train")
    thread = Thread(target=lambda: list(loader(3, 0.01)))
    thread.start()
    thread.join()
    assert tracker.meter.clock.seconds()["data_wait"] == 0
    # As a reader does; Paddle's own fetches ahead while the test is held up, and waits less then.
    benchmark().before_reader()
    time.sleep(0.03)
    benchmark().after_reader()
    assert tracker.meter.clock.seconds()["data_wait"] >= 0.03
    mlflow_tokens.autolog(disable=True)
    list(loader(3, 0.01))
    assert list(benchmark().hooks) == ["timer_hook"]


def reading(rank: int, step: int, train: float, waited: float) -> Reading:
    seconds = dict.fromkeys(PHASES, 0.0) | {"train": train, "data_wait": waited}
    return Reading(rank, step, step, 10 * step, 8 * step, 8 * step, seconds)


def recorded(*readings: Reading, live: bool = True, baseline: dict[int, Reading] | None = None) -> Quantities:
    return quantities(
        {each.rank: each for each in readings},
        segment=segment("a", (2,)),
        seq=1,
        moment=Moment("final" if live else "step", Question(1, live=live), 10, 1_700_000_000.0, 0.0),
        baseline=baseline or {},
        past=Past(),
    )


def test_the_slowest_rank_and_what_the_others_waited_for_it() -> None:
    # Ten steps each: 5.0 and 5.4 s a step; waited 4 and 10 s.
    record = recorded(reading(0, 10, train=46.0, waited=4.0), reading(1, 10, train=44.0, waited=10.0))
    assert record.pace == Pace(1, 5.4, 5.2, 1, 10.0, 54.0, 2)
    # 1 USD a second: of 90 USD of training, 2 x 10 - 14 = 6.
    account = account_of([segment("a", (2,)), price("3600 USD/device-hour"), record])
    metrics = derive(account, account, "final").metrics
    assert metrics["throughput/step_time_skew"] == pytest.approx(5.4 / 5.2)
    assert metrics["throughput/slowest_rank"] == 1
    assert metrics["throughput/data_wait_ratio"] == pytest.approx(14 / 104)
    assert metrics["throughput/data_wait_ratio_slowest_rank"] == pytest.approx(10 / 54)
    assert metrics["cost/waste/straggler"] == pytest.approx(6.0)


def test_a_run_before_this_one_in_the_process_is_left_out() -> None:
    record = recorded(
        reading(0, 15, train=56.0, waited=5.0),
        reading(1, 15, train=54.0, waited=12.0),
        baseline={0: reading(0, 5, train=10.0, waited=1.0), 1: reading(1, 5, train=10.0, waited=2.0)},
    )
    assert record.pace == Pace(1, 5.4, 5.2, 1, 10.0, 54.0, 2)


def test_what_was_waited_before_a_restart_is_added() -> None:
    records = [segment("a", (2,)), price("3600 USD/device-hour")]
    first = recorded(reading(0, 10, train=46.0, waited=4.0), reading(1, 10, train=44.0, waited=10.0))
    alone = Quantities(**{**_fields(first), "segment": "b", "ranks_reporting": 1, "pace": None, "seq": 2})
    account = account_of([*records, first, segment("b", (1,)), price("3600 USD/device-hour"), alone])
    assert account.straggler_seconds == pytest.approx(6.0)
    # Of two ranks of which one has not reported, nothing is known, and so of the whole run.
    account = account_of([*records, first, segment("b", (2,)), price("3600 USD/device-hour"), alone])
    assert account.straggler_seconds is None


def _fields(record: Quantities) -> dict[str, Any]:
    return {name: getattr(record, name) for name in Quantities.__slots__}


def test_where_no_reader_tells_of_waiting_nothing_is_said_of_it() -> None:
    record = recorded(reading(0, 10, train=50.0, waited=0.0), reading(1, 10, train=54.0, waited=0.0))
    account = account_of([segment("a", (2,)), price("3600 USD/device-hour"), record])
    names = derive(account, account, "final").metrics.keys()
    assert "throughput/step_time_skew" in names
    assert not {"throughput/data_wait_ratio", "cost/waste/straggler"} & names
    assert recorded(reading(0, 1, 1.0, 0.0), reading(1, 0, 0.0, 0.0)).pace is None
    assert recorded(reading(0, 1, 1.0, 0.0), reading(1, 1, 1.0, 0.0), live=False).pace is None


def test_two_processes_one_of_which_is_slow_to_read(stored: Stored, tmp_path: Path) -> None:
    done = launch(2, cwd=tmp_path, script=SCRIPTS / "readers.py")
    assert done.status == 0, done.output
    said = sorted((json.loads(text) for text in re.findall(r"^WAITED (.*)$", done.output, re.M)), key=str)
    waited = {each["rank"]: each["waited"] for each in said}
    assert {each["batches"] for each in said} == {12}
    metrics = stored.metrics()
    # At 1 USD a second: as much longer as rank 1 has waited, by its own watch.
    assert waited[1] > 11 * 0.02
    assert (waited[1] - waited[0]) / 2 <= metrics["cost/waste/straggler"] <= waited[1]
    assert metrics["tokens/computed"] == 2 * 12 * 2 * 6
    assert 0 < metrics["throughput/data_wait_ratio"] < metrics["throughput/data_wait_ratio_slowest_rank"] < 1
    assert metrics["throughput/step_time_skew"] >= 1
