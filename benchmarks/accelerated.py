"""The records of long runs, made without training: memory, rows and the size of the journal."""

from __future__ import annotations

import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

from mlflow_tokens.aggregate import Moment
from mlflow_tokens.cadence import Heartbeat, interval_at
from mlflow_tokens.clock import PHASES
from mlflow_tokens.journal import Journal
from mlflow_tokens.ledger import Ledger
from mlflow_tokens.meter import Reading
from mlflow_tokens.pricing import parse_price
from mlflow_tokens.ranks import Question
from mlflow_tokens.recorder import Recorder
from mlflow_tokens.records import (
    PriceSet,
    Quantities,
    Record,
    Rollback,
    RunBound,
    SegmentStart,
    SnapshotKind,
)
from mlflow_tokens.sinks.writer import BATCH
from mlflow_tokens.snapshot import Snapshot
from mlflow_tokens.spool import Spool

STEPS = 1_000_000
STEP_SECONDS = 1.2096  # a million of them are two weeks
T0 = 1_700_000_000.0


def records(*, checkpoint_every: int, rollback: bool = False) -> Iterator[Record]:
    """A run of 8 ranks, a million steps and two weeks, `log_every_steps=10`, with heartbeats.

    rollback: a day before its end the run goes back by a day.
    """
    price = parse_price("2 USD/device-hour")
    assert price is not None
    seq, rewinds, last = 0, 0, 0

    def quantities(segment: str, kind: SnapshotKind, step: int, since: int) -> Quantities:
        nonlocal seq
        seq += 1
        steps = step - since
        seconds = steps * STEP_SECONDS
        return Quantities(
            segment=segment,
            seq=seq,
            kind=kind,
            step=step,
            position=step,
            micro_batches=8 * steps,
            t_mono=seconds,
            t_wall=T0 + seq + step * STEP_SECONDS,
            elapsed=seconds,
            ranks_reporting=8,
            tokens={"computed": 8 * 8192 * steps, "valid": 8 * 8000 * steps, "trained": 8 * 7000 * steps},
            device_seconds={"NVIDIA H800": {"startup": 480.0, "train": 7.6 * seconds, "eval": 0.4 * seconds}},
            rewinds=rewinds,
        )

    day = round(86_400 / STEP_SECONDS)
    for segment, begin, end in (
        [("a", 0, STEPS - day), ("b", STEPS - 2 * day, STEPS)] if rollback else [("a", 0, STEPS)]
    ):
        if begin:
            yield Rollback(segment, T0, "a", begin)
            rewinds += 1
        yield SegmentStart(
            segment, segment, T0, 8, "NVIDIA H800", (8,), "valid = computed - padding", "mask", "dp 8", "0"
        )
        yield PriceSet(T0, price)
        last, heartbeat = begin, Heartbeat(0.0)
        for step in range(begin + 1, end + 1):
            now = (step - begin) * STEP_SECONDS
            if heartbeat.seconds_left(now) <= 0:
                heartbeat.beat(now)
                yield quantities(segment, "heartbeat", step - 1, begin)
            if step - last >= interval_at(step, 10):
                last = step
                heartbeat.snapshot_taken(now)
                yield quantities(segment, "step", step, begin)
            if step % checkpoint_every == 0:
                yield quantities(segment, "checkpoint", step, begin)
        yield quantities(segment, "final", end, begin)


def memory() -> float:
    """MiB of account and spool together at the end of a million steps, a checkpoint every 100."""
    made = list(records(checkpoint_every=100))
    tracemalloc.start()
    ledger, spool = Ledger(), Spool(lambda seq: ())
    spool.begin((), delivered=True)
    for record in made:
        snapshot = ledger.apply(record)
        if snapshot is not None:
            spool.add(snapshot)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 2**20


def restart() -> tuple[float, float, float]:
    """Of a process that goes on with the journal of a million steps, no sink having any of it.

    MiB at most, while a sink reads all of it; seconds until the recorder has read the journal; seconds of
    reading the snapshots, as a sink does that takes them at once.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        journal = Journal(path)
        for record in records(checkpoint_every=100):
            journal.append(record)
        journal.close()
        begun, read = _restarted(path)
        tracemalloc.start()
        # Which makes all of it slow; of what a sink reads from the journal the last part takes most.
        _restarted(path, skip=0.6)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak / 2**20, begun, read


def _restarted(path: Path, skip: float = 0.0) -> tuple[float, float]:
    own = Reading(0, 0, 0, 0, 0, 0, dict.fromkeys(PHASES, 0.0))
    segment = SegmentStart("c", "c", T0 + 2e6, 1, "NVIDIA H800", (1,), "", "mask", "", "0")
    began = time.monotonic()
    recorder = Recorder(
        segment=segment,
        price=None,
        bound=RunBound("run", "sqlite:///none.db"),
        journal_path=path,
        collect=lambda question, timeout: {0: own},
        baseline={},
        checkpoint=None,
        position=lambda: STEPS,
    )
    recorder.start([], None)
    spool = recorder.spool
    with spool.changed:
        spool.changed.wait_for(lambda: spool.begun)
    begun = time.monotonic()
    newest = int(skip * spool.newest)
    while batch := spool.after(newest, BATCH):
        newest = batch[-1].seq
    read = time.monotonic()
    recorder.end(Moment("final", Question(0, live=True), STEPS, recorder.wall(), time.monotonic()))
    return begun - began, read - begun


def rows(*, checkpoint_every: int, rollback: bool) -> int:
    """Points that a store gets of two weeks."""
    ledger = Ledger()
    snapshots: Iterator[Snapshot | None] = map(
        ledger.apply, records(checkpoint_every=checkpoint_every, rollback=rollback)
    )
    return len({point for snapshot in snapshots if snapshot for point, _ in snapshot.points()})


def journal_size() -> float:
    """MiB of a journal of a million steps, a checkpoint every 100."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "run.jsonl")
        for record in records(checkpoint_every=100):
            journal.append(record)
        size = journal.size
        journal.close()
    return size / 2**20
