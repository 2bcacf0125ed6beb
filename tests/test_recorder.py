"""What the recorder writes down, and when; on a clock that is moved by hand."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from mlflow_tokens import run_journal
from mlflow_tokens.aggregate import Moment
from mlflow_tokens.clock import PHASES
from mlflow_tokens.journal import Journal, read_journal
from mlflow_tokens.meter import Reading
from mlflow_tokens.ranks import Question
from mlflow_tokens.recorder import Recorder
from mlflow_tokens.records import Quantities, RunBound, SnapshotKind
from tests.journals import segment


class HandClock:
    """Seconds, moved by hand; rank 0 has trained all the time, 10 tokens a step."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def now(self) -> float:
        return self.seconds

    def collect(self, question: Question, timeout: float) -> dict[int, Reading]:
        seconds = {phase: self.seconds if phase == "train" else 0.0 for phase in PHASES}
        step = question.step
        return {0: Reading(0, step, step, 10 * step, 10 * step, 10 * step, seconds)}


def recorder_on(clock: HandClock, path: Path) -> Recorder:
    return Recorder(
        segment=segment("a", (1,)),
        price=None,
        bound=RunBound(None, "unused", owned=True),
        journal_path=path,
        collect=clock.collect,
        baseline={},
        checkpoint=None,
        position=lambda: 0,
        now=clock.now,
    )


def written(path: Path) -> list[Quantities]:
    return [record for record in read_journal(path) if isinstance(record, Quantities)]


def test_the_end_is_of_when_it_is_read_and_not_of_when_it_was_asked_for(tmp_path: Path) -> None:
    """Else the next segment's gap would begin too early, and what lies between be billed twice."""
    recorder = recorder_on(HandClock(25.0), tmp_path / "a.jsonl")
    recorder.start([], None)
    recorder.end(Moment("final", Question(5, live=True), 5, recorder.wall(), t_mono=10.0))
    (record,) = written(tmp_path / "a.jsonl")
    assert (record.t_mono, record.elapsed) == (25.0, 25.0)


def test_a_journal_of_its_full_size_takes_a_snapshot_an_hour_and_every_checkpoint_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_journal, "FULL", 10_000)
    clock, path = HandClock(0.0), tmp_path / "a.jsonl"
    recorder = recorder_on(clock, path)
    # What the recorder's thread does with the moments it is given, one after the other.
    recorder._prepare()

    def take(kind: SnapshotKind, step: int) -> None:
        clock.seconds = 60.0 * step
        recorder._take(Moment(kind, Question(step), step, recorder.wall(), clock.seconds))

    for step in range(1, 301):
        take("step", step)
        if step == 200:
            take("checkpoint", step)
    take("final", 300)
    full = next(n for n in range(1, 300) if size_after(path, n) >= 10_000)
    assert 10 < full < 100
    assert [(record.kind, record.step) for record in written(path)[full:]] == [
        *[("step", step) for step in range(full + 60, 200, 60)],
        ("checkpoint", 200),
        ("step", 260),
        ("final", 300),
    ]
    assert written(path)[-1].tokens["computed"] == 3000


def size_after(path: Path, quantities: int) -> int:
    """Bytes of the journal with its first so many records of quantities."""
    size = 0
    for line in path.read_bytes().splitlines(keepends=True):
        size += len(line)
        quantities -= b'"record":"quantities"' in line
        if not quantities:
            break
    return size


def test_what_a_full_disk_did_not_take_is_written_once_there_is_room_without_another_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may be killed before it has anything more to record."""
    write, tries, taken = Journal._write, [0], threading.Event()

    def limited(journal: Journal, line: bytes) -> None:
        is_quantities = b'"record":"quantities"' in line
        tries[0] += is_quantities
        if is_quantities and tries[0] == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(journal, line)
        if is_quantities:
            taken.set()

    monkeypatch.setattr(Journal, "_write", limited)
    path = tmp_path / "a.jsonl"
    recorder = recorder_on(HandClock(25.0), path)
    recorder.start([], None)
    recorder.put(Moment("step", Question(5), 5, recorder.wall(), t_mono=10.0))
    assert taken.wait(30)
    assert [record.step for record in written(path)] == [5]
    recorder.end(Moment("final", Question(5, live=True), 5, recorder.wall(), t_mono=10.0))
    assert [record.kind for record in written(path)] == ["step", "final"]
