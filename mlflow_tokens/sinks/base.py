"""What a sink is, and the thread that writes to one."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from mlflow_tokens.metrics import Snapshot
from mlflow_tokens.notices import logger, say_once

#: Snapshots that wait for a sink at most; what does not fit is in the journal alone.
CAPACITY = 4096
#: Snapshots that are written at once at most: 15 metrics each, and MLflow takes 1,000 a request.
BATCH = 64
#: After a write the sink rests this many times as long, in s at most: it takes 4% of a core or less.
REST, REST_LAST = 24.0, 30.0
#: Seconds that the end of a run waits for a sink across a network, and for one on this machine, which
#: may have to make its database first.
EXIT_TIMEOUT_REMOTE, EXIT_TIMEOUT_LOCAL = 5.0, 30.0
#: Seconds between attempts to write to a sink that fails, doubled up to the second.
RETRY_FIRST, RETRY_LAST = 1.0, 60.0


_ours = threading.local()


def is_our_thread() -> bool:
    """Whether this thread writes our own metrics, so that nobody mistakes them for the script's."""
    return getattr(_ours, "writing", False)


class Sink(Protocol):
    """A place for snapshots. All methods are called from one background thread."""

    name: str
    exit_timeout: float
    """Seconds that the end of a run waits for this sink."""
    in_order: bool
    """Whether snapshots must come in the order of their time."""

    def write(self, snapshots: Sequence[Snapshot]) -> None:
        """Write some snapshots. May raise; it may then be called again with the same ones."""

    def close(self, status: str) -> None:
        """The run has ended with `status` (FINISHED, FAILED or KILLED)."""


class Writer:
    """Feeds one sink from one daemon thread, so that nobody waits for it and none touches another."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.sink_name = sink.name
        self.exit_timeout = sink.exit_timeout
        self._queue: queue.Queue[Snapshot | None] = queue.Queue(CAPACITY)
        self._hurry = threading.Event()
        self._done = threading.Event()
        self._last: Snapshot | None = None
        self._status = ""
        self._complete = True
        threading.Thread(target=self._run, name=f"mlflow_tokens-{sink.name}", daemon=True).start()

    def put(self, snapshot: Snapshot) -> None:
        """Hand over a snapshot without waiting."""
        try:
            self._queue.put_nowait(snapshot)
        except queue.Full:
            self._complete = False
            say_once(
                f"full:{self.sink_name}",
                "%s is too slow: some points are in the journal alone.",
                self.sink_name,
            )

    def end(self, last: Snapshot | None, status: str) -> None:
        """No more comes after `last`: write what waits, without further retries, and close the sink."""
        self._last, self._status = last, status
        self._hurry.set()
        with suppress(queue.Full):  # a full queue wakes the thread as well
            self._queue.put_nowait(None)

    def wait(self, deadline: float) -> bool:
        """Whether everything was written and the sink closed by `deadline` (`time.monotonic`)."""
        return self._done.wait(max(0.0, deadline - time.monotonic())) and self._complete

    def _run(self) -> None:
        _ours.writing = True
        unwritten: list[Snapshot] = []
        while not self._hurry.is_set():
            batch = self._next_batch()
            began = time.monotonic()
            if batch and not self._write(batch):
                unwritten = batch
            # Python runs one thread at a time: what a sink takes, training lacks. What comes meanwhile
            # goes into the next request, which is cheaper as well.
            self._hurry.wait(min(REST * (time.monotonic() - began), REST_LAST))
        self._write_the_rest(unwritten)
        try:
            self._sink.close(self._status)
        except Exception as error:
            self._complete = False
            logger.warning("Could not close %s: %s: %s", self.sink_name, type(error).__name__, error)
        self._done.set()

    def _next_batch(self) -> list[Snapshot]:
        """What waits, or else the next one that comes; at most BATCH."""
        batch = [self._queue.get()]
        with suppress(queue.Empty):
            while len(batch) < BATCH:
                batch.append(self._queue.get_nowait())
        return [snapshot for snapshot in batch if snapshot is not None]

    def _write(self, batch: list[Snapshot]) -> bool:
        """Try until it is written; whether it was before the run ended."""
        pause = RETRY_FIRST
        while not self._try(batch):
            if self._hurry.wait(pause):
                return False
            pause = min(2 * pause, RETRY_LAST)
        return True

    def _write_the_rest(self, unwritten: list[Snapshot]) -> None:
        rest = list(unwritten)
        while not self._queue.empty():
            rest += self._next_batch()
        last = [] if self._last is None else [self._last]
        # The last one has the final figures: where the order is free it does not wait for a backlog.
        parts = [rest[start : start + BATCH] for start in range(0, len(rest), BATCH)]
        for batch in [*parts, last] if self._sink.in_order else [last, *parts]:
            if batch and not self._try(batch):
                self._complete = False
                return

    def _try(self, batch: list[Snapshot]) -> bool:
        try:
            self._sink.write(batch)
        except Exception as error:
            say_once(
                f"write:{self.sink_name}",
                "Could not write to %s (%s: %s); trying again, training goes on.",
                self.sink_name,
                type(error).__name__,
                error,
            )
            return False
        return True
