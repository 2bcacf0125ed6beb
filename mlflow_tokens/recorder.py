"""Rank 0's record of one run: readings in, journal written, snapshots out. All on a background thread."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlflow_tokens.aggregate import Moment, Past, quantities
from mlflow_tokens.cadence import Heartbeat
from mlflow_tokens.checkpoint import Checkpoint
from mlflow_tokens.journal import last_quantities, late_answers, read_journal, recorded_times
from mlflow_tokens.late_past import Ask, LatePast
from mlflow_tokens.ledger import Ledger, replay
from mlflow_tokens.meter import Reading
from mlflow_tokens.notices import logger, say_once
from mlflow_tokens.ranks import Question
from mlflow_tokens.records import (
    CarriedOver,
    PriceSet,
    Quantities,
    Record,
    RunBound,
    SegmentEnd,
    SegmentStart,
)
from mlflow_tokens.resume import (
    History,
    HistoryOf,
    OpenPast,
    late_records,
    left_open,
    past_records,
    unknown_past,
)
from mlflow_tokens.run_journal import RunJournal
from mlflow_tokens.run_report import RunReport, run_report_of
from mlflow_tokens.sinks.writer import Writer
from mlflow_tokens.snapshot import Snapshot
from mlflow_tokens.spool import RECENT, Spool
from mlflow_tokens.statement_text import to_text

#: Seconds that a snapshot waits for the other ranks' readings of its step.
COLLECT_TIMEOUT = 10.0
#: Seconds that the end of a run waits for the other ranks and for the sinks, each.
EXIT_TIMEOUT = 5.0
#: Seconds that the end of a run waits for MLflow to say what it has of the run's past.
LATE_TIMEOUT = 3.0
#: Seconds between two looks at whether a snapshot is asked for.
LOOK = 0.25

#: Asks all ranks, rank 0 included, and waits at most so many seconds.
Collect = Callable[[Question, float], Mapping[int, Reading]]


@dataclass(frozen=True, slots=True)
class Rewind:
    """Training has loaded a checkpoint in the middle of the run."""

    checkpoint: Checkpoint
    before: Moment
    """The moment of loading: what was trained up to here is what is thrown away."""


class Recorder:
    """Turns moments into snapshots for one run, from its first snapshot to its end.

    Args:
        bound: the run, as far as it is known. collect: readings of all ranks.
        baseline: each rank's reading when the run began; what came before is not this run's.
        checkpoint: what training resumes from, if that is known.
        position: where the axis stands now, for heartbeats. price_changes: prices that will apply, in the
            order of their time. now, time_of_day: seconds, for differences and for what is of the calendar.

    Raises:
        JournalTaken: another process is writing the journal of this run.
    """

    def __init__(
        self,
        *,
        segment: SegmentStart,
        price: PriceSet | None,
        bound: RunBound,
        journal_path: Path,
        collect: Collect,
        baseline: Mapping[int, Reading],
        checkpoint: Checkpoint | None,
        position: Callable[[], int],
        price_changes: Sequence[PriceSet] = (),
        now: Callable[[], float] = time.monotonic,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        self._segment, self._price, self._bound = segment, price, replace(bound, segment=segment.segment)
        self._price_changes = deque(price_changes)
        self._collect = collect
        self._baseline = dict(baseline)
        self._checkpoint = checkpoint
        self._position = position
        self._now, self._time_of_day = now, time_of_day
        self._seq = 0
        self._last: Snapshot | None = None
        self._last_taken = 0.0
        self._journal = RunJournal(journal_path)
        self._ledger = Ledger()
        self._began_here: set[str] = set()
        self._past = Past()
        self._readings: Mapping[int, Reading] = {}
        self._history_of: HistoryOf | None = None
        self._ask: Ask | None = None
        self._left_open: OpenPast | None = None
        self._late: LatePast | None = None
        self._writers: list[Writer] = []
        self._heartbeat = Heartbeat(now())
        self._moments: queue.SimpleQueue[Moment | Rewind] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._ended, self._abandoned = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlflow_tokens-recorder", daemon=True)
        self.spool = Spool(lambda seq: replay(read_journal(self._journal.path), seq))
        self._wall_lock, self._wall_ms = threading.Lock(), 0
        self.earlier_step, self.earlier_position = self._earlier()

    def start(self, writers: list[Writer], history_of: HistoryOf | None, ask: Ask | None = None) -> None:
        """Begin to take snapshots, for these sinks.

        history_of: of runs that MLflow may know already. ask: about this run, where that did not answer.
        """
        self._writers, self._history_of, self._ask = writers, history_of, ask
        # Before a checkpoint can be saved, and before anybody is asked: should this process die, `sync` and
        # whoever resumes from that checkpoint see that it lived.
        self._journal.append(self._bound)
        self._thread.start()

    def wall(self) -> float:
        """The time of day in s, but never one that a point of this run may have already.

        A store tells points by their time in ms, and takes the latest for the newest: a clock that is
        set back must not show.
        """
        with self._wall_lock:
            self._wall_ms = max(round(self._time_of_day() * 1000), self._wall_ms + 1)
            return self._wall_ms / 1000

    def put(self, moment: Moment | Rewind) -> None:
        """Ask for a snapshot, or for a rollback, without waiting for it.

        The recorder's thread is not woken, which would be most of the cost: it looks for itself.
        """
        self._moments.put(moment)

    def run_known(self, run: str) -> None:
        """Write down where the run is kept. Called by the sink that found or started it."""
        known = replace(self._bound, run=run)
        if known == self._bound:
            return
        self._bound = known
        self._journal.append(known)
        self._journal.name_after(run)

    def end(self, moment: Moment) -> Mapping[int, Reading]:
        """Take the final snapshot and wait, within limits, until the sinks have everything.

        Returns the last readings: the baseline of a run that follows in this process.
        """
        self._moments.put(moment)
        self._hurry.set()
        # The recorder's own limits, and some seconds for a machine that is busy.
        if not self._ended.wait(2 * EXIT_TIMEOUT + self._longest_exit()):
            logger.warning(
                "The end of the run could not be recorded in time; %s", self._journal.where_the_rest_is()
            )
            # A thread that reads device memory while the interpreter goes down aborts the process.
            self._abandoned.set()
            self._thread.join(1.0)
        return self._readings

    def _longest_exit(self) -> float:
        return max((writer.exit_timeout for writer in self._writers), default=0.0)

    # ---- on the recorder's thread -----------------------------------------------------------------

    def _run(self) -> None:
        self._prepare()
        while not self._abandoned.is_set():
            moment = self._next()
            try:
                if isinstance(moment, Rewind):
                    self._rewind(moment)
                elif isinstance(moment, PriceSet):
                    self._change_price(moment)
                else:
                    self._take(moment)
            except Exception as error:
                say_once("recorder", "A snapshot could not be taken: %s: %s", type(error).__name__, error)
            if isinstance(moment, Moment) and moment.kind == "final":
                self._finish(moment.status)
                return

    def _prepare(self) -> None:
        """Read what the run had before, find where training resumes, and open this segment."""
        earlier: deque[Snapshot] = deque(maxlen=RECENT)
        delivered = True
        records: list[Record] = []
        try:
            delivered = self._replay_journal(earlier)
            records = self._past_records(self._checkpoint, self._segment.t_wall, self._history_of)
        except Exception as error:
            say_once("recorder", "The run's past could not be read: %s: %s", type(error).__name__, error)
            records = [unknown_past(self._bound.run or "", self.earlier_step, self.earlier_position)]
        asked_now = left_open(records, self._checkpoint)
        resumed = bool(self._ledger.account.milestones or records) and asked_now is None
        for record in records:
            self._record(record)
        self._late = self._late_past(asked_now or self._left_open)
        self._past = Past(self.earlier_step, self._ledger.account.rewinds, resumed)
        self._record(self._segment)
        if self._price is not None:
            self._record(self._price)
        self.spool.begin(earlier, delivered=delivered)

    def _past_records(
        self, checkpoint: Checkpoint | None, t_wall: float, history_of: HistoryOf | None
    ) -> list[Record]:
        return past_records(
            self._ledger.account,
            checkpoint,
            run=self._bound.run,
            segment=self._segment.segment,
            now=t_wall,
            directory=self._journal.path.parent,
            history_of=history_of,
            began_here=self._began_here,
        )

    def _late_past(self, past: OpenPast | None) -> LatePast | None:
        run = self._bound.run
        if past is None or run is None or self._ask is None:
            return None

        def question(history: History) -> list[Record]:
            return late_records(past, run, history, recorded_times(self._journal.path))

        return LatePast(self._ask, question, self._now)

    def _replay_journal(self, earlier: deque[Snapshot]) -> bool:
        """Fold what the journal holds; whether all of it had reached the sinks."""
        delivered = True
        if not self._journal.is_open:
            return delivered
        for record in read_journal(self._journal.path):
            snapshot = self._ledger.apply(record)
            if snapshot is not None:
                earlier.append(snapshot)
            if isinstance(record, SegmentStart | RunBound):
                self._began_here.add(record.segment)
            if isinstance(record, CarriedOver):
                self._left_open = left_open([record])
            if isinstance(record, Quantities):
                self._seq = max(self._seq, record.seq)
                delivered = False
            elif isinstance(record, SegmentEnd):
                delivered = not record.undelivered
        return delivered

    def _next(self) -> Moment | Rewind | PriceSet:
        while True:
            try:
                moment = self._moments.get_nowait()
            except queue.Empty:
                self._journal.write_rest()
                if self._price_changes and self._price_changes[0].t_wall <= self._time_of_day():
                    return self._price_changes.popleft()
                if (left := self._heartbeat.seconds_left(self._now())) > 0:
                    self._hurry.wait(min(left, LOOK))
                    continue
                self._heartbeat.beat(self._now())
                return self._live_moment()
            if isinstance(moment, Moment) and moment.kind == "step":
                self._heartbeat.snapshot_taken(self._now())
            return moment

    def _live_moment(self) -> Moment:
        return Moment("heartbeat", Question(0, live=True), self._position(), self.wall(), self._now())

    def _change_price(self, price: PriceSet) -> None:
        """Charge what was held up to now at the price until now, however full the journal is."""
        try:
            self._take(self._live_moment(), always=True)
        finally:
            self._record(price)

    def _take(self, moment: Moment, *, always: bool = False) -> None:
        always = always or moment.kind == "final"
        if not always and self._journal.leaves_out(moment.kind, self._now() - self._last_taken):
            return
        self._learn_past(at_end=moment.kind == "final")
        if moment.question.live:
            # It may have waited for its turn, and its seconds are those of now.
            moment = moment._replace(t_mono=self._now())
        timeout = EXIT_TIMEOUT if moment.kind == "final" else COLLECT_TIMEOUT
        self._readings = self._collect(moment.question, timeout)
        self._seq += 1
        record = quantities(
            self._readings,
            segment=self._segment,
            seq=self._seq,
            moment=moment,
            baseline=self._baseline,
            past=self._past,
        )
        snapshot = self._record(record)
        self._last_taken = self._now()
        if moment.kind == "final":
            self._last = snapshot
        elif snapshot is not None:
            self.spool.add(snapshot)

    def _learn_past(self, *, at_end: bool) -> None:
        """Where MLflow did not say what the run had before, and does now, begin the account with that."""
        if self._late is None:
            return
        records = self._late.answer_at_end(LATE_TIMEOUT) if at_end else self._late.answer()
        if records is None:
            return
        self._late = None
        for record in records:
            self._journal.append(record)
        try:
            if not late_answers(self._journal.path):
                raise OSError("it has not taken it")
            ledger = Ledger()
            snapshots = [ledger.apply(record) for record in read_journal(self._journal.path)]
        except (OSError, ValueError) as error:
            say_once("late", "Totals stay unknown: the journal does not say what the run had (%s).", error)
        else:
            self._ledger = ledger
            self.spool.restate(snapshot for snapshot in snapshots if snapshot is not None)

    def _rewind(self, rewind: Rewind) -> None:
        self._take(rewind.before)
        steps = self._ledger.account.step
        for record in self._past_records(rewind.checkpoint, rewind.before.t_wall, None):
            self._record(record)
        account = self._ledger.account
        self._past = replace(self._past, step=self._past.step + account.step - steps, rewinds=account.rewinds)

    def _finish(self, status: str) -> None:
        report = self._report(status) if self._last is not None else None
        for writer in self._writers:
            writer.end(self._last, status, report)
        began = time.monotonic()
        late = tuple(
            writer.sink_name for writer in self._writers if not writer.wait(began + writer.exit_timeout)
        )
        if late:
            missed = " and ".join(late)
            logger.warning(
                "Not everything reached %s before the end of the run; %s",
                missed,
                self._journal.where_the_rest_is(),
            )
        self._journal.append(SegmentEnd(self._segment.segment, self._time_of_day(), status, late))
        self._journal.close()
        self._ended.set()

    def _report(self, status: str) -> RunReport | None:
        """What the run says of itself; its end does not depend on it."""
        try:
            report = run_report_of(self._ledger, status)
            # That there is no price was said at the start.
            if "no_price" not in report.statement.unknown:
                logger.info("%s", to_text(report.statement))
        except Exception as error:
            say_once("report", "The run's report could not be made: %s: %s", type(error).__name__, error)
            return None
        return report

    # ---- the journal ------------------------------------------------------------------------------

    def _earlier(self) -> tuple[int, int]:
        """Optimizer step and position at which training begins; in no time, for the training thread asks."""
        last = None
        try:
            last = last_quantities(self._journal.path)
        except (OSError, ValueError) as error:
            say_once("journal", "The journal %s cannot be continued: %s", self._journal.path, error)
        if last is not None:
            self._wall_ms = round(last.t_wall * 1000)
        if self._checkpoint is not None:
            self._wall_ms = max(self._wall_ms, self._checkpoint.timestamp_ms)
            return self._checkpoint.step, self._checkpoint.position
        return (last.step, last.position) if last else (0, 0)

    def _record(self, record: Record) -> Snapshot | None:
        self._journal.append(record)
        return self._ledger.apply(record)
