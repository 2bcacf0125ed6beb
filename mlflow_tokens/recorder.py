"""Rank 0's record of one run: readings in, journal written, snapshots out. All on a background thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlflow_tokens.cadence import Heartbeat
from mlflow_tokens.clock import PHASES
from mlflow_tokens.journal import Journal, read_journal
from mlflow_tokens.ledger import Ledger
from mlflow_tokens.meter import Reading
from mlflow_tokens.metrics import Snapshot
from mlflow_tokens.notices import logger, say_once
from mlflow_tokens.ranks import Question
from mlflow_tokens.records import (
    PriceSet,
    Quantities,
    Record,
    RunBound,
    SegmentEnd,
    SegmentStart,
    SnapshotKind,
)
from mlflow_tokens.sinks.base import Writer

#: Seconds that a snapshot waits for the other ranks' readings of its step.
COLLECT_TIMEOUT = 10.0
#: Seconds that the end of a run waits for the other ranks and for the sinks, each.
EXIT_TIMEOUT = 5.0

#: Asks all ranks, rank 0 included, and waits at most so many seconds.
Collect = Callable[[Question, float], Mapping[int, Reading]]


@dataclass(frozen=True, slots=True)
class Moment:
    """A snapshot to be taken: the totals asked for, and its position on the axis.

    status: how the run ends, of a final one.
    """

    kind: SnapshotKind
    question: Question
    position: int
    t_wall: float
    t_mono: float
    status: str = "FINISHED"


class Recorder:
    """Turns moments into snapshots for one run, from its first snapshot to its end.

    Args:
        collect: readings of all ranks.
        baseline: each rank's reading when the run began; what came before is not this run's.
        position: where the axis stands now, for heartbeats.
    """

    def __init__(
        self,
        *,
        segment: SegmentStart,
        price: PriceSet | None,
        journal_path: Path,
        collect: Collect,
        baseline: Mapping[int, Reading],
        position: Callable[[], int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._segment = segment
        self._collect = collect
        self._baseline = dict(baseline)
        self._position = position
        self._now = now
        self._seq = 0
        self._last: Snapshot | None = None
        self._journal_path = journal_path
        self._journal: Journal | None = None
        self._journal_lock = threading.Lock()
        self._ledger = Ledger()
        self._readings: Mapping[int, Reading] = {}
        self._writers: list[Writer] = []
        self._heartbeat = Heartbeat(now())
        self._moments: queue.SimpleQueue[Moment] = queue.SimpleQueue()
        self._ended, self._abandoned = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlflow_tokens-recorder", daemon=True)
        self._continue_journal()
        self.earlier = self._ledger.account
        """What the journal of this run held already: an earlier tracker or process has logged to it."""
        self._open_journal()
        self._record(segment)
        if price is not None:
            self._record(price)

    def start(self, writers: list[Writer]) -> None:
        """Begin to take snapshots, for these sinks."""
        self._writers = writers
        self._thread.start()

    def put(self, moment: Moment) -> None:
        """Ask for a snapshot without waiting for it."""
        self._moments.put(moment)

    def run_known(self, run: RunBound) -> None:
        """Write down where the run is kept. Called by the sink that found or started it."""
        self._append(run)

    def end(self, moment: Moment) -> Mapping[int, Reading]:
        """Take the final snapshot and wait, within limits, until the sinks have everything.

        Returns the last readings: the baseline of a run that follows in this process.
        """
        self._moments.put(moment)
        # The recorder's own limits, and some seconds for a machine that is busy.
        if not self._ended.wait(2 * EXIT_TIMEOUT + self._longest_exit()):
            logger.warning("The end of the run could not be recorded in time; %s", self._where_the_rest_is())
            # A thread that reads device memory while the interpreter goes down aborts the process.
            self._abandoned.set()
            self._thread.join(1.0)
        return self._readings

    def _longest_exit(self) -> float:
        return max((writer.exit_timeout for writer in self._writers), default=0.0)

    def _where_the_rest_is(self) -> str:
        return f"all of it is in {self._journal_path}." if self._journal is not None else "no journal has it."

    def _run(self) -> None:
        while not self._abandoned.is_set():
            moment = self._next()
            try:
                self._take(moment)
            except Exception as error:
                say_once("recorder", "A snapshot could not be taken: %s: %s", type(error).__name__, error)
            if moment.kind == "final":
                self._finish(moment.status)
                return

    def _next(self) -> Moment:
        while True:
            try:
                moment = self._moments.get(timeout=max(0.0, self._heartbeat.seconds_left(self._now())))
            except queue.Empty:
                self._heartbeat.beat(self._now())
                return Moment("heartbeat", Question(0, live=True), self._position(), time.time(), self._now())
            if moment.kind == "step":
                self._heartbeat.snapshot_taken(self._now())
            return moment

    def _take(self, moment: Moment) -> None:
        timeout = EXIT_TIMEOUT if moment.kind == "final" else COLLECT_TIMEOUT
        self._readings = self._collect(moment.question, timeout)
        self._seq += 1
        record = quantities(
            self._segment,
            self._seq,
            moment,
            self._readings,
            self._baseline,
            earlier_step=self.earlier.step,
        )
        snapshot = self._record(record)
        if moment.kind == "final":
            self._last = snapshot
        elif snapshot is not None:
            for writer in self._writers:
                writer.put(snapshot)

    def _finish(self, status: str) -> None:
        for writer in self._writers:
            writer.end(self._last, status)
        began = time.monotonic()
        late = [writer.sink_name for writer in self._writers if not writer.wait(began + writer.exit_timeout)]
        if late:
            missed = " and ".join(late)
            logger.warning(
                "Not everything reached %s before the end of the run; %s", missed, self._where_the_rest_is()
            )
        self._append(SegmentEnd(self._segment.segment, time.time(), status))
        with self._journal_lock:
            if self._journal is not None:
                self._journal.close()
                self._journal = None
        self._ended.set()

    def _continue_journal(self) -> None:
        try:
            for record in read_journal(self._journal_path):
                self._ledger.apply(record)
                if isinstance(record, Quantities):
                    self._seq = record.seq
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, ValueError) as error:
            say_once("journal", "The journal %s cannot be continued: %s", self._journal_path, error)

    def _open_journal(self) -> None:
        try:
            self._journal = Journal(self._journal_path)
        except OSError as error:
            say_once(
                "journal",
                "No journal can be kept in %s (%s); what a sink misses is lost.",
                self._journal_path.parent,
                error,
            )

    def _record(self, record: Record) -> Snapshot | None:
        self._append(record)
        return self._ledger.apply(record)

    def _append(self, record: Record) -> None:
        with self._journal_lock:
            if self._journal is None:
                return
            try:
                self._journal.append(record)
            except OSError as error:
                say_once("journal", "The journal %s cannot be written: %s", self._journal_path, error)


def quantities(
    segment: SegmentStart,
    seq: int,
    moment: Moment,
    readings: Mapping[int, Reading],
    baseline: Mapping[int, Reading],
    *,
    earlier_step: int = 0,
) -> Quantities:
    """Add up the readings of all ranks, less what each had when the run began.

    Every rank holds tokens of its own (data parallel), and a device each. A kind of token that one
    rank does not know is unknown for all, and everything is while a rank has never reported.
    """
    own, first = readings[0], baseline.get(0)
    tokens: dict[str, int] = {}
    complete = len(readings) == segment.world_size
    for kind in ("computed", "valid", "trained") if complete else ():
        parts = [
            _since(getattr(reading, kind), baseline.get(rank), kind) for rank, reading in readings.items()
        ]
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            tokens[kind] = sum(known)
    seconds = {
        phase: round(
            sum(
                reading.seconds[phase] - (baseline[rank].seconds[phase] if rank in baseline else 0.0)
                for rank, reading in readings.items()
            ),
            6,
        )
        for phase in PHASES
    }
    return Quantities(
        segment=segment.segment,
        seq=seq,
        kind=moment.kind,
        step=earlier_step + own.step - (first.step if first else 0),
        position=moment.position,
        micro_batches=own.micro_batches - (first.micro_batches if first else 0),
        t_mono=moment.t_mono,
        t_wall=moment.t_wall,
        elapsed=round(sum(own.seconds.values()) - (sum(first.seconds.values()) if first else 0.0), 6),
        ranks_reporting=len(readings),
        tokens=tokens,
        device_seconds={segment.device_type: {phase: held for phase, held in seconds.items() if held}},
    )


def _since(total: int | None, first: Reading | None, kind: str) -> int | None:
    if first is None or total is None:
        return total
    before: int | None = getattr(first, kind)
    return None if before is None else total - before
