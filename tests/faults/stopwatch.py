"""How long a call took, and how much of that the thread stood still for want of something.

On a busy machine a thread also waits for a core. The kernel counts that apart, so what remains is what
the call itself waited for: a lock, a disk, a network, another thread of Python.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from types import TracebackType


class Stopwatch:
    """Measures blocks on one thread; `seconds` and `blocked` are of the last one."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.blocked = 0.0
        self._schedstat: int | None = None
        with suppress(OSError):
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def _ran_and_queued(self) -> float:
        """Seconds this thread has run or waited for a core."""
        if self._schedstat is None:
            return time.thread_time()
        ran, queued, _ = os.pread(self._schedstat, 100, 0).split()
        return (int(ran) + int(queued)) / 1e9

    def __enter__(self) -> Stopwatch:
        self._busy = self._ran_and_queued()
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.seconds = time.perf_counter() - self._began
        self.blocked = max(0.0, self.seconds - (self._ran_and_queued() - self._busy))
