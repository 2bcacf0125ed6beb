"""The thread that writes to one sink."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from typing import TypeVar

from mlflow_tokens.notices import logger, say_once
from mlflow_tokens.run_report import RunReport
from mlflow_tokens.sinks.base import EXIT_TIMEOUT_REMOTE, Sink, mark_our_thread
from mlflow_tokens.snapshot import Point, Snapshot
from mlflow_tokens.spool import Spool

#: Snapshots that are written at once at most: 15 metrics each, and MLflow takes 1,000 a request.
BATCH = 64
#: After a write the sink rests this many times as long as it used a core, in s at most: it takes 1% of one.
REST, REST_LAST = 99.0, 8.0
#: Seconds between attempts to write to a sink that fails: doubled from the first to the last, and each
#: time a random part of it, so that the jobs of a cluster do not come back all at once.
RETRY_FIRST, RETRY_LAST = 0.5, 30.0
#: The same while the end of the run waits.
RETRY_AT_END = 1.0

Answer = TypeVar("Answer")
_jitter = random.Random()


class Writer:
    """Feeds one sink from one daemon thread, so that nobody waits for it and none touches another.

    It keeps no snapshots, only the number of the last one written: the spool has them.
    """

    def __init__(self, sink: Sink, spool: Spool) -> None:
        self._sink = sink
        self._spool = spool
        self.sink_name = sink.name
        self.exit_timeout = sink.exit_timeout
        self._questions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._cursor: int | None = None
        self._check_until = 0
        self._restated = 0
        self._stored: AbstractSet[Point] | None = None
        self._hurry = threading.Event()
        self._done = threading.Event()
        self._last: Snapshot | None = None
        self._status = ""
        self._report: RunReport | None = None
        self._deadline = 0.0
        self._complete = False
        threading.Thread(target=self._run, name=f"mlflow_tokens-{sink.name}", daemon=True).start()

    def ask(self, question: Callable[[], Answer]) -> Future[Answer]:
        """Have a question to the sink answered on its thread, before anything else is written."""
        future: Future[Answer] = Future()

        def answer() -> None:
            try:
                future.set_result(question())
            except Exception as error:
                future.set_exception(error)

        self._questions.put(answer)
        self._wake()
        return future

    def end(self, last: Snapshot | None, status: str, report: RunReport | None = None) -> None:
        """No more comes after `last`: write what waits, within the sink's time, and close it."""
        self._last, self._status, self._report = last, status, report
        # A local sink may be slow, and is waited for; one that fails is not tried again for as long.
        self._deadline = time.monotonic() + min(self.exit_timeout, EXIT_TIMEOUT_REMOTE)
        self._hurry.set()
        self._wake()

    def wait(self, deadline: float) -> bool:
        """Whether everything was written and the sink closed by `deadline` (`time.monotonic`)."""
        return self._done.wait(max(0.0, deadline - time.monotonic())) and self._complete

    def _wake(self) -> None:
        with self._spool.changed:
            self._spool.changed.notify_all()

    def _rest(self, seconds: float) -> None:
        """Write nothing for a while; a question does not wait for it."""
        with self._spool.changed:
            self._spool.changed.wait_for(lambda: self._hurry.is_set() or not self._questions.empty(), seconds)

    def _has_work(self) -> bool:
        if not self._questions.empty() or self._hurry.is_set():
            return True
        return self._spool.begun and self._spool.newest > self._begin()

    def _begin(self) -> int:
        if self._cursor is None:
            self._cursor, self._check_until = self._spool.start, self._spool.backlog_end
        if self._restated != self._spool.restated:
            self._restated = self._spool.restated
            self._cursor, self._check_until, self._stored = 0, self._spool.newest, None
        return self._cursor

    def _run(self) -> None:
        mark_our_thread()
        pause = RETRY_FIRST
        while True:
            with self._spool.changed:
                self._spool.changed.wait_for(self._has_work)
            while not self._questions.empty():
                self._questions.get()()
            if self._hurry.is_set():
                break
            if not self._spool.begun:
                continue  # where to begin is not known yet
            began = time.thread_time()
            if self._write_next():
                # Python runs one thread at a time: what a sink takes, training lacks. What comes
                # meanwhile goes into the next request, which is cheaper as well.
                self._rest(min(REST * (time.thread_time() - began), REST_LAST))
                pause = RETRY_FIRST
            else:
                self._rest(pause * _jitter.uniform(0.5, 1.0))
                pause = min(2 * pause, RETRY_LAST)
        self._finish()
        self._done.set()

    def _write_next(self) -> bool:
        batch = self._spool.after(self._begin(), BATCH)
        if batch and not self._try(batch):
            return False
        if batch:
            self._cursor = batch[-1].seq
        return True

    def _finish(self) -> None:
        """Write the rest and close, trying again as long as there is time."""
        last = [] if self._last is None else [self._last]
        if self._sink.in_order:
            self._complete = self._insist(self._write_rest) and self._insist(lambda: self._try(last))
            self._attach()
            self._complete = self._insist(self._close) and self._complete
        else:
            # The last one has the final figures: where the order is free it does not wait for a backlog.
            self._complete = self._insist(lambda: self._try(last)) and self._insist(self._close)
            self._complete = self._complete and self._insist(self._write_rest)
            self._attach()

    def _insist(self, attempt: Callable[[], bool]) -> bool:
        pause = RETRY_FIRST / 2
        while not attempt():
            left = self._deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause * _jitter.uniform(0.5, 1.0), left))
            pause = min(2 * pause, RETRY_AT_END)
        return True

    def _write_rest(self) -> bool:
        while self._spool.begun and self._spool.newest > self._begin():
            if not self._write_next():
                return False
        return True

    def _attach(self) -> None:
        """Once, and only where all else is there: the report says nothing that the journal does not."""
        if self._report is None or not self._complete:
            return
        try:
            self._sink.attach(self._report)
        except Exception as error:
            say_once(
                f"attach:{self.sink_name}",
                "The run's report could not be kept in %s: %s: %s",
                self.sink_name,
                type(error).__name__,
                error,
            )

    def _try(self, batch: Sequence[Snapshot]) -> bool:
        if not batch:
            return True
        try:
            self._sink.write(batch, self._skip(batch[0].seq))
        except Exception as error:
            # Some of it may be there all the same: a request whose answer was lost, say.
            self._check_until, self._stored = max(self._check_until, batch[-1].seq), None
            say_once(
                f"write:{self.sink_name}",
                "Could not write to %s (%s: %s); trying again, training goes on.",
                self.sink_name,
                type(error).__name__,
                error,
            )
            return False
        return True

    def _skip(self, seq: int) -> AbstractSet[Point]:
        """The points that must not be written a second time; asked for only where there may be some."""
        if seq > self._check_until:
            self._stored = None
            return frozenset()
        if self._stored is None:
            self._stored = self._sink.stored()
        return self._stored

    def _close(self) -> bool:
        try:
            self._sink.close(self._status)
        except Exception as error:
            if time.monotonic() >= self._deadline:
                logger.warning("Could not close %s: %s: %s", self.sink_name, type(error).__name__, error)
            return False
        return True
