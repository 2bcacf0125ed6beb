"""Snapshots on their way to sinks that are slow, fail in between, or were away for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import pytest

from mlflow_tokens import spool as spool_module
from mlflow_tokens.sinks import writer as writer_module
from mlflow_tokens.sinks.writer import Writer
from mlflow_tokens.snapshot import Point, Snapshot
from mlflow_tokens.spool import Spool


def snapshot(seq: int) -> Snapshot:
    return Snapshot("step", seq, seq, seq, 1000 * seq, {"cost/total": float(seq), "device/hours": 1.0}, {})


JOURNAL = [snapshot(seq) for seq in range(1, 201)]


class FlakySink:
    """Keeps repeats, as a file store does; fails as told, after it has taken a part of what it was given."""

    name = "flaky"
    exit_timeout = 20.0

    def __init__(self, *, in_order: bool = True, failures: int = 0) -> None:
        self.in_order = in_order
        self.failures = failures
        self.points: list[Point] = []
        self.closed: list[str] = []
        self.away = threading.Event()

    def write(self, snapshots: Sequence[Snapshot], skip: AbstractSet[Point] = frozenset()) -> None:
        if self.away.is_set():
            raise OSError("away")
        points = [point for item in snapshots for point, _ in item.points() if point not in skip]
        if self.failures:
            self.failures -= 1
            self.points += points[: len(points) // 2]
            raise OSError("the answer was lost")
        self.points += points

    def stored(self) -> AbstractSet[Point]:
        if self.away.is_set():
            raise OSError("away")
        return set(self.points)

    def close(self, status: str) -> None:
        self.closed.append(status)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little memory that most of it comes from the journal, and no waiting between attempts."""
    monkeypatch.setattr(spool_module, "RECENT", 8)
    monkeypatch.setattr(spool_module, "CHUNK", 16)
    monkeypatch.setattr(writer_module, "RETRY_FIRST", 0.001)
    monkeypatch.setattr(writer_module, "RETRY_LAST", 0.001)
    monkeypatch.setattr(writer_module, "REST", 0.0)


def new_spool() -> tuple[Spool, list[Snapshot]]:
    on_disk: list[Snapshot] = []
    return Spool(lambda seq: [item for item in list(on_disk) if item.seq > seq]), on_disk


def points_of(snapshots: Sequence[Snapshot]) -> list[Point]:
    return [point for item in snapshots for point, _ in item.points()]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("failures", [0, 1, 7])
def test_every_point_arrives_once_whatever_fails(in_order: bool, failures: int) -> None:
    spool, on_disk = new_spool()
    sink = FlakySink(in_order=in_order, failures=failures)
    writer = Writer(sink, spool)
    spool.begin((), delivered=True)
    for item in JOURNAL[:-1]:
        on_disk.append(item)
        spool.add(item)
    writer.end(JOURNAL[-1], "FINISHED")
    assert writer.wait(time.monotonic() + 60)
    assert sorted(sink.points) == sorted(points_of(JOURNAL))
    assert sink.closed == ["FINISHED"]
    if in_order and not failures:
        assert sink.points == points_of(JOURNAL)


@pytest.mark.usefixtures("small")
def test_a_sink_that_was_away_is_served_from_the_journal_when_it_is_back() -> None:
    spool, on_disk = new_spool()
    sink = FlakySink()
    sink.away.set()
    writer = Writer(sink, spool)
    spool.begin((), delivered=True)
    for item in JOURNAL:
        on_disk.append(item)
        spool.add(item)
    assert sink.points == []
    sink.away.clear()
    writer.end(None, "KILLED")
    assert writer.wait(time.monotonic() + 60)
    assert sink.points == points_of(JOURNAL)


@pytest.mark.usefixtures("small")
def test_after_a_restart_only_what_is_missing_is_written() -> None:
    spool, on_disk = new_spool()
    on_disk += JOURNAL[:150]
    sink = FlakySink()
    sink.points = points_of(JOURNAL[:90])[:-1]  # killed in the middle of a snapshot
    writer = Writer(sink, spool)
    spool.begin(JOURNAL[142:150], delivered=False)
    for item in JOURNAL[150:]:
        on_disk.append(item)
        spool.add(item)
    writer.end(None, "FINISHED")
    assert writer.wait(time.monotonic() + 60)
    assert sorted(sink.points) == sorted(points_of(JOURNAL))


@pytest.mark.usefixtures("small")
def test_a_sink_that_never_comes_back_stops_no_other_and_is_said_to_be_late() -> None:
    spool, on_disk = new_spool()
    dead, alive = FlakySink(), FlakySink()
    dead.away.set()
    dead.exit_timeout = 0.05
    writers = [Writer(dead, spool), Writer(alive, spool)]
    spool.begin((), delivered=True)
    for item in JOURNAL:
        on_disk.append(item)
        spool.add(item)
    for writer in writers:
        writer.end(None, "FINISHED")
    assert writers[1].wait(time.monotonic() + 60)
    assert alive.points == points_of(JOURNAL)
    assert not writers[0].wait(time.monotonic() + 60)
    assert (dead.points, dead.closed) == ([], ["FINISHED"])


def test_a_question_is_answered_on_the_writers_thread_before_anything_is_written() -> None:
    spool, on_disk = new_spool()
    sink = FlakySink()
    writer = Writer(sink, spool)
    asked = writer.ask(lambda: (threading.current_thread().name, list(sink.points)))
    assert asked.result(timeout=30) == ("mlflow_tokens-flaky", [])
    # Nor does it begin before it is told where: a run that is resumed would be written from its start.
    writer.ask(lambda: None).result(timeout=30)
    on_disk += JOURNAL
    spool.begin(JOURNAL[192:], delivered=True)
    with pytest.raises(ZeroDivisionError):
        writer.ask(lambda: 1 / 0).result(timeout=30)
    writer.end(None, "FINISHED")
    assert writer.wait(time.monotonic() + 60)
    assert sink.points == []
