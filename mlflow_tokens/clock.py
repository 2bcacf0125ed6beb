"""The monotonic phase clock: what the wall time of one rank went to."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Literal, get_args

Phase = Literal["startup", "restart", "train", "data_wait", "eval", "checkpoint", "other"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class PhaseClock:
    """Charges every second since `started` to exactly one phase.

    Time is cut into stretches. `mark` closes the running stretch, `switch` closes it and opens one of
    another phase, and `reclassify` says that the running stretch has been of another phase all along:
    the time between two steps turns out to be evaluation when the first evaluation batch is seen. Of a
    stretch of training a part may be a wait for data.

    Safe to read from other threads. Seconds are of `now`, which must never go backwards.
    """

    def __init__(self, started: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._phase: Phase = "startup"
        self._opened = now() if started is None else started
        self._waited = 0.0

    @property
    def phase(self) -> Phase:
        """The phase of the running stretch."""
        return self._phase

    def mark(self) -> None:
        """Close the running stretch and open one of the same phase."""
        with self._lock:
            self._close()

    def switch(self, phase: Phase) -> None:
        """Close the running stretch and open one of `phase`."""
        with self._lock:
            self._close()
            self._phase = phase

    def reclassify(self, phase: Phase) -> None:
        """Charge the running stretch, from its beginning and with what it waited, to `phase`."""
        with self._lock:
            self._phase, self._waited = phase, 0.0

    def waited_for_data(self, seconds: float) -> None:
        """The last so many seconds were a wait for data, of a stretch of training."""
        with self._lock:
            if self._phase == "train":
                self._waited = min(self._waited + seconds, self._now() - self._opened)

    def seconds(self) -> dict[Phase, float]:
        """Seconds by phase up to this moment, the running stretch included."""
        with self._lock:
            seconds = dict(self._seconds)
            seconds[self._phase] += self._now() - self._opened - self._waited
            seconds["data_wait"] += self._waited
        return seconds

    def _close(self) -> None:
        now = self._now()
        self._seconds[self._phase] += now - self._opened - self._waited
        self._seconds["data_wait"] += self._waited
        self._opened, self._waited = now, 0.0


def process_started() -> float:
    """When this process began, on the scale of `time.monotonic`, in seconds.

    From /proc/self/stat, field 22 (proc(5)): ticks since boot. Where there is no /proc, and in an
    interactive session, whose idle hours are not the run's, it is the present moment.
    """
    if is_interactive():
        return time.monotonic()
    try:
        with open("/proc/self/stat", encoding="ascii") as stat:
            # The command name, in parentheses, may hold spaces: count fields after its end.
            fields = stat.read().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        # A process that is held up between two readings would seem older than it is by as much.
        now, since_boot = _at_once(lambda: time.clock_gettime(time.CLOCK_BOOTTIME))
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic()
    return min(now, now - since_boot + began)


def _at_once(other: Callable[[], float]) -> tuple[float, float]:
    """`time.monotonic` and another clock at the same moment: the closest of some readings."""
    readings = []
    for _ in range(5):
        before, there, after = time.monotonic(), other(), time.monotonic()
        readings.append((after - before, (before + after) / 2, there))
    _, now, there = min(readings)
    return now, there


def is_interactive() -> bool:
    """Whether this is a Python prompt or a notebook."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules
