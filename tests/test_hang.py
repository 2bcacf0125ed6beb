"""A hang is billed and seen while it lasts."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path

from mlflow_tokens.aggregate import Moment
from mlflow_tokens.clock import PHASES
from mlflow_tokens.meter import Reading
from mlflow_tokens.ranks import Question
from mlflow_tokens.recorder import Recorder
from mlflow_tokens.records import RunBound
from mlflow_tokens.sinks.jsonl import JsonlSink
from mlflow_tokens.sinks.writer import Writer
from tests.journals import price, segment

DEVICES, TRAINED, HUNG = 512, 10.0, 1800.0


class FakeRanks:
    """512 ranks that train for 10 s and are then stuck in a collective for 30 minutes.

    The clock moves on by ten minutes, the longest wait, whenever the recorder looks at it.
    """

    def __init__(self) -> None:
        self.stuck = False
        self.released = threading.Event()
        self.hung = 0.0
        self._time = TRAINED

    def now(self) -> float:
        if self.stuck and not self.released.is_set():
            self._time += 600
        return self._time

    def collect(self, question: Question, timeout: float) -> Mapping[int, Reading]:
        seconds = {phase: self._time if phase == "train" else 0.0 for phase in PHASES}
        if self._time >= TRAINED + HUNG:
            self.released.set()
            self.hung = self._time - TRAINED
        self.stuck = True
        return {rank: Reading(rank, 5, 5, 100, 90, 80, seconds) for rank in range(DEVICES)}


def test_thirty_minutes_in_a_stuck_collective_on_512_devices_at_2_usd_an_hour_are_512_usd(
    tmp_path: Path,
) -> None:
    ranks = FakeRanks()
    recorder = Recorder(
        segment=segment("a", (8,) * 64),
        price=price("2 USD/device-hour"),
        bound=RunBound(None, "unused", owned=True),
        journal_path=tmp_path / "a.jsonl",
        collect=ranks.collect,
        baseline={},
        checkpoint=None,
        position=lambda: 5,
        now=ranks.now,
    )
    writer = Writer(JsonlSink(tmp_path / "points.jsonl", {}), recorder.spool)
    recorder.start([writer], None)
    recorder.put(Moment("step", Question(5), 5, recorder.wall(), TRAINED))
    assert ranks.released.wait(60)
    # Nothing has ended: this is what anybody who looks sees during the hang.
    recorder.end(Moment("final", Question(5, live=True), 5, recorder.wall(), TRAINED + HUNG))
    lines = [json.loads(line) for line in (tmp_path / "points.jsonl").read_text().splitlines()[1:]]
    heartbeats = [line["metrics"] for line in lines if line["kind"] == "heartbeat"]
    (step,) = [line["metrics"] for line in lines if line["kind"] == "step"]
    costs = [metrics["cost/total"] for metrics in heartbeats]
    assert costs == sorted(costs)
    # The heartbeat that comes after 30 minutes: 512 USD by then, and 512 / 1800 for each second more.
    assert 1800 <= ranks.hung <= 3600
    assert round(costs[-1] - step["cost/total"], 9) == round(512 * ranks.hung / 1800, 9)
    assert round(heartbeats[-1]["device/hours"] - step["device/hours"], 9) == round(
        256 * ranks.hung / 1800, 9
    )
