"""What a sink is, and the thread that writes to one."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from mlflow_tokens.metrics import Snapshot
from mlflow_tokens.notices import logger, say_once

#: Snapshots that wait for a sink at most; what does not fit is in the journal alone.
CAPACITY = 4096
#: Seconds between attempts to write to a sink that fails, doubled up to the second.
RETRY_FIRST, RETRY_LAST = 1.0, 60.0


_ours = threading.local()


def is_our_thread() -> bool:
    """Whether this thread writes our own metrics, so that nobody mistakes them for the script's."""
    return getattr(_ours, "writing", False)


class Sink(Protocol):
    """A place for snapshots. All methods are called from one background thread, in order."""

    name: str

    def write(self, snapshot: Snapshot) -> None:
        """Write one snapshot. May raise; it is then called again with the same snapshot."""

    def close(self, status: str) -> None:
        """The run has ended with `status` (FINISHED, FAILED or KILLED)."""


@dataclass(frozen=True, slots=True)
class _End:
    status: str


class Writer:
    """Feeds one sink from one daemon thread, so that nobody waits for it and none touches another."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.sink_name = sink.name
        self._queue: queue.Queue[Snapshot | _End] = queue.Queue(CAPACITY)
        self._hurry = threading.Event()
        self._done = threading.Event()
        self.complete = True
        """Whether everything that was put has been written so far, or is still on its way."""
        threading.Thread(target=self._run, name=f"mlflow_tokens-{sink.name}", daemon=True).start()

    def put(self, snapshot: Snapshot) -> None:
        """Hand over a snapshot without waiting."""
        try:
            self._queue.put_nowait(snapshot)
        except queue.Full:
            self.complete = False
            say_once(
                f"full:{self._sink.name}",
                "%s is too slow: some points are in the journal alone.",
                self._sink.name,
            )

    def end(self, status: str) -> None:
        """Say that no more comes: write what waits, without further retries, and close the sink."""
        self._hurry.set()
        try:
            self._queue.put_nowait(_End(status))
        except queue.Full:
            self.complete = False

    def wait(self, deadline: float) -> bool:
        """Whether everything was written and the sink closed by `deadline` (`time.monotonic`)."""
        return self._done.wait(max(0.0, deadline - time.monotonic())) and self.complete

    def _run(self) -> None:
        _ours.writing = True
        while True:
            item = self._queue.get()
            if isinstance(item, _End):
                self._close(item.status)
                return
            self._write(item)

    def _write(self, snapshot: Snapshot) -> None:
        pause = RETRY_FIRST
        while True:
            try:
                self._sink.write(snapshot)
                return
            except Exception as error:
                say_once(
                    f"write:{self._sink.name}",
                    "Could not write to %s (%s: %s); trying again, training goes on.",
                    self._sink.name,
                    type(error).__name__,
                    error,
                )
                if self._hurry.wait(pause):
                    self.complete = False
                    return
                pause = min(2 * pause, RETRY_LAST)

    def _close(self, status: str) -> None:
        try:
            self._sink.close(status)
        except Exception as error:
            self.complete = False
            logger.warning("Could not close %s: %s: %s", self._sink.name, type(error).__name__, error)
        self._done.set()
