"""What one rank has done so far: tokens, steps and seconds, with no I/O."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlflow_tokens.clock import Phase, PhaseClock
from mlflow_tokens.counting import BatchCounts, Scalar

#: Steps whose totals can still be asked for, counted back from the newest.
HISTORY = 512


@dataclass(frozen=True, slots=True)
class Reading:
    """Cumulative totals of one rank at the end of `step`. None means unknown. Plain numbers."""

    rank: int
    step: int
    micro_batches: int
    computed: int | None
    valid: int | None
    trained: int | None
    seconds: Mapping[Phase, float]
    final: bool = False


@dataclass(frozen=True, slots=True)
class _Tally:
    """Running totals; the scalars may still be on the device. A total once unknown stays unknown."""

    micro_batches: int = 0
    computed: Scalar | None = 0
    valid: Scalar | None = 0
    trained: Scalar | None = 0


@dataclass(frozen=True, slots=True)
class _Mark:
    step: int
    tally: _Tally
    seconds: Mapping[Phase, float]


class Meter:
    """Adds up the micro-batches of one rank and remembers the totals of the last steps.

    The training thread calls `count`, `count_labels` and `step`; none of them reads device memory.
    `reading` may be called from any thread: it is where device memory is read.
    """

    def __init__(self, rank: int, clock: PhaseClock) -> None:
        self.rank = rank
        self.clock = clock
        self._lock = threading.Lock()
        self._running = _Tally()
        self._awaiting_labels: deque[frozenset[int]] = deque()
        self._history: deque[_Mark] = deque([_Mark(0, _Tally(), clock.seconds())], maxlen=HISTORY)
        self._step = 0

    @property
    def current_step(self) -> int:
        """Optimizer steps finished."""
        return self._step

    @property
    def micro_batches(self) -> int:
        """Micro-batches seen, those of an unfinished step included."""
        return self._running.micro_batches

    @property
    def in_step(self) -> bool:
        """Whether micro-batches were counted that no step has ended yet."""
        return self._running is not self._history[-1].tally

    def count(self, batch: BatchCounts) -> None:
        """Add one micro-batch; it belongs to the step that `step` ends next."""
        if self.clock.phase != "train":
            self.clock.switch("train")
        running = self._running
        self._running = _Tally(
            running.micro_batches + 1,
            _add(running.computed, batch.computed),
            _add(running.valid, batch.valid),
            running.trained if batch.trained is None else _add(running.trained, batch.trained),
        )
        if batch.trained is None:
            self._awaiting_labels.append(batch.label_sizes)

    def awaits_labels(self, labels_size: int) -> bool:
        """Whether the newest micro-batch still lacks labels, and so many would fit it."""
        return bool(self._awaiting_labels) and labels_size in self._awaiting_labels[-1]

    def count_labels(self, trained: Scalar) -> None:
        """Add the trained tokens of the newest micro-batch, seen on their way into the loss."""
        self._awaiting_labels.pop()
        self._running = replace(self._running, trained=_add(self._running.trained, trained))

    def step(self) -> int:
        """End the optimizer step and return its number, from 1."""
        if self._awaiting_labels:
            self._awaiting_labels.clear()
            self._running = replace(self._running, trained=None)
        self.clock.mark()
        mark = _Mark(self._step + 1, self._running, self.clock.seconds())
        with self._lock:
            self._history.append(mark)
            self._step = mark.step
        return mark.step

    def drop_unfinished_step(self) -> None:
        """Forget micro-batches that no step has ended: their run is over."""
        self._awaiting_labels.clear()
        self._running = self._history[-1].tally

    def reading(self, step: int = 0, *, live: bool = False, final: bool = False) -> Reading | None:
        """Totals at the end of `step`; None while it is not finished.

        A step that is no longer remembered is answered with the oldest one that is; the reading says
        which. `live` gives the newest step not before `step`, with the seconds of this moment. Reads
        device memory: not for the training thread.
        """
        with self._lock:
            marks = list(self._history)
        if marks[-1].step < step:
            return None
        if live or final:
            return self._read(replace(marks[-1], seconds=self.clock.seconds()), final)
        return self._read(next(mark for mark in marks if mark.step >= step), final)

    def _read(self, mark: _Mark, final: bool) -> Reading:
        tally = mark.tally
        return Reading(
            rank=self.rank,
            step=mark.step,
            micro_batches=tally.micro_batches,
            computed=_to_int(tally.computed),
            valid=_to_int(tally.valid),
            trained=_to_int(tally.trained),
            seconds=mark.seconds,
            final=final,
        )


def _add(total: Any, part: Any) -> Any:
    return None if total is None or part is None else total + part


def _to_int(value: Scalar | None) -> int | None:
    return None if value is None else int(value)
