"""When a snapshot is due, and at which step of the script's own axis it is logged.

MLflow joins two metrics on equal steps only, so loss against tokens is empty unless ours are logged at
the steps at which the script logs its loss. The script's numbering is learnt from what it logs.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Snapshots before the interval doubles, again and again: 1e6 steps at an interval of 10 give 1,791.
SNAPSHOTS_PER_DOUBLING = 200

#: Seconds of silence after which a heartbeat is due: doubled from the first to the last.
HEARTBEAT_FIRST = 30.0
HEARTBEAT_LAST = 600.0


def interval_at(step: int, base: int) -> int:
    """Steps between snapshots around `step`: `base`, doubled for every 200 snapshots taken so far.

    A pure function of the step, so a resumed run goes on where it was.
    """
    interval, end = base, base * SNAPSHOTS_PER_DOUBLING
    while step > end:
        interval *= 2
        end += interval * SNAPSHOTS_PER_DOUBLING
    return interval


@dataclass(slots=True)
class _Seen:
    """One metric logged by the script: its step, our optimizer step, our micro-batches."""

    script: int
    step: int
    micro_batches: int


class Cadence:
    """Decides on rank 0 whether a moment gets a snapshot, and its position on the axis.

    The axis is the optimizer step until the script logs at steps of its own: then it is the script's,
    which may count optimizer steps or micro-batches, from 0 or from 1. A numbering that fits neither
    (epochs) is not adopted. Positions never go back.
    """

    def __init__(self, log_every_steps: int) -> None:
        self._base = log_every_steps
        self._offset = 0
        self._by_micro_batch = False
        self._seen: _Seen | None = None
        self._script_interval = 0
        self._last_step: int | None = None
        self._last_joined: int | None = None
        self._last_position = 0

    def position(self, step: int, micro_batches: int) -> int:
        """Where a snapshot of this moment is logged."""
        return max(self._last_position, self._axis(step, micro_batches))

    def after_step(self, step: int, micro_batches: int) -> int | None:
        """An optimizer step has ended: the position of a snapshot, or None if none is due.

        While the script logs regularly, its own steps are waited for, so that both series join.
        """
        interval = interval_at(step, self._base)
        wait = interval if not self._script_interval else 2 * max(interval, self._script_interval)
        if step - (self._last_step or 0) < wait:
            return None
        return self._take(step, self.position(step, micro_batches))

    def after_script_log(self, script_step: int, step: int, micro_batches: int) -> int | None:
        """The script has logged a metric at `script_step`: the position of a snapshot, or None."""
        before, self._seen = self._seen, _Seen(script_step, step, micro_batches)
        learnt = not self._fits(self._seen) and self._learn(self._seen, before)
        if not step or not (learnt or self._fits(self._seen)):
            return None
        if before is not None and step > before.step:
            self._script_interval = step - before.step
        # A numbering just learnt is logged at once: the sooner both series have a step in common.
        joined = self._last_joined
        if not learnt and joined is not None and step - joined < interval_at(step, self._base):
            return None
        self._last_joined = step
        position = self.position(step, micro_batches)
        return (
            None if (step, position) == (self._last_step, self._last_position) else self._take(step, position)
        )

    def restart(self, step: int, micro_batches: int, earlier_position: int, last_step: int) -> None:
        """The run turns out to have a past, up to `earlier_position`; its last snapshot is of `last_step`."""
        self._take(last_step, max(earlier_position, self._axis(step, micro_batches)))

    def rewind(self, step: int, micro_batches: int, position: int) -> None:
        """Training goes back to a checkpoint that was saved at `position`."""
        ours = micro_batches if self._by_micro_batch else step
        self._offset = position - ours
        self._seen = self._last_joined = None
        self._last_step, self._last_position = step, position

    def _axis(self, step: int, micro_batches: int) -> int:
        return self._offset + (micro_batches if self._by_micro_batch else step)

    def _fits(self, seen: _Seen) -> bool:
        return seen.script == self._axis(seen.step, seen.micro_batches)

    def _learn(self, seen: _Seen, before: _Seen | None) -> bool:
        """Find the numbering that explains what was seen, and adopt it unless it would go back."""
        for by_micro_batch in (False, True):
            ours = seen.micro_batches if by_micro_batch else seen.step
            offset = seen.script - ours
            if before is None:
                explained = offset in (0, -1)
            else:
                ours_before = before.micro_batches if by_micro_batch else before.step
                explained = seen.script > before.script and offset == before.script - ours_before
            # A count from 0 lags ours by one: at its first sight it may be one behind what was logged.
            if explained and seen.script >= self._last_position - 1:
                self._offset, self._by_micro_batch = offset, by_micro_batch
                return True
        return False

    def _take(self, step: int, position: int) -> int:
        self._last_step, self._last_position = step, position
        return position


class Heartbeat:
    """Decides when silence is worth a line: after 30 s, 60 s, 120 s, … and then every 10 minutes.

    A hang is seen and billed while it lasts, without a row every 30 s in a run whose steps are slow.
    """

    def __init__(self, now: float) -> None:
        self._wait = HEARTBEAT_FIRST
        self._last = now

    def snapshot_taken(self, now: float) -> None:
        """A snapshot was taken at a step: silence begins anew."""
        self._wait, self._last = HEARTBEAT_FIRST, now

    def seconds_left(self, now: float) -> float:
        """Seconds until the next heartbeat is due; 0 or less when it is."""
        return self._last + self._wait - now

    def beat(self, now: float) -> None:
        """A heartbeat was taken."""
        self._wait, self._last = min(2 * self._wait, HEARTBEAT_LAST), now
