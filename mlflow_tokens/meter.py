"""What one rank has done so far: tokens, steps and seconds."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from mlflow_tokens.clock import Phase, PhaseClock
from mlflow_tokens.counting import BatchCounts, Scalar, read_scalar
from mlflow_tokens.lengths import Lengths, LengthSampler, ToHost
from mlflow_tokens.notices import say_once
from mlflow_tokens.sources import SourceCounts, add_sources
from mlflow_tokens.topology import Place, Topology

#: Steps whose totals can still be asked for, counted back from the newest.
HISTORY = 512

#: Micro-batches that go into the fingerprint of a rank that shares sequences with others.
FINGERPRINTS = 16

_NO_PADDING_YET = (
    "Valid tokens are not logged until an attention mask shows padding: masks of query by key, as here, need "
    'not tell it. Of packed data say pad="none", else state pad_token_id=….'
)
_UNREADABLE_MASK = (
    "Valid tokens are unknown: the attention mask holds NaN, or whole numbers below 0; state pad_token_id=…."
)


@dataclass(frozen=True, slots=True)
class Reading:
    """Cumulative totals of one rank at the end of `step`. None means unknown. Plain numbers.

    skipped: valid tokens of steps that were not taken. routed: tokens x experts that they were sent to.
    by_source: computed and valid tokens of each data source. lengths: of a sample of the rows, up to the
    moment of reading; in octaves, unless the reading is a live one. place: whose tokens these are.
    """

    rank: int
    step: int
    micro_batches: int
    computed: int | None
    valid: int | None
    trained: int | None
    seconds: Mapping[Phase, float]
    final: bool = False
    skipped: int | None = 0
    routed: int | None = 0
    by_source: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)
    lengths: Lengths = field(default_factory=Lengths)
    place: Place = field(default_factory=Place)


class _Tally(NamedTuple):
    """Running totals; the scalars may still be on the device. A total once unknown stays unknown.

    A tuple, since one is made for every micro-batch.
    """

    micro_batches: int = 0
    computed: Scalar | None = 0
    valid: Scalar | None = 0
    trained: Scalar | None = 0
    skipped: Scalar | None = 0
    routed: int | None = 0
    by_source: Mapping[str, SourceCounts] = MappingProxyType({})
    by_square: tuple[int, Scalar] = (0, 0)
    fingerprint: tuple[int, Scalar] = (0, 0)


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
        self.topology: Topology | None = None
        """How this rank's tokens relate to those of others; None for data parallel ranks."""
        self.to_host: ToHost = list
        """Brings scalars from the device, for a reading."""
        self._lock = threading.Lock()
        self._running = _Tally()
        self._awaiting_labels: deque[frozenset[int]] = deque()
        self._history: deque[_Mark] = deque([_Mark(0, self._running, clock.seconds())], maxlen=HISTORY)
        self._step = 0
        self._committed = self._running
        """The tally when the last step ended or was skipped."""
        self._sampler = LengthSampler()

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
        return self._running is not self._committed

    @property
    def samples_lengths(self) -> bool:
        """Whether the next micro-batch is to be counted by rows."""
        return self._sampler.due(self._running.micro_batches)

    @property
    def wants_fingerprint(self) -> bool:
        """Whether the next micro-batch is to be counted with a fingerprint."""
        topology = self.topology
        return bool(topology and topology.sequence and self._running.fingerprint[0] < FINGERPRINTS)

    def count(self, batch: BatchCounts) -> None:
        """Add one micro-batch; it belongs to the step that `step` ends next."""
        if self.clock.phase != "train":
            self.clock.switch("train")
        running = self._running
        by_source, before, square = running.by_source, running.by_square, batch.by_square
        self._running = _Tally(
            running.micro_batches + 1,
            _add(running.computed, batch.computed),
            _add(running.valid, batch.valid),
            running.trained if batch.trained is None else _add(running.trained, batch.trained),
            running.skipped,
            running.routed,
            add_sources(by_source, batch.by_source) if batch.by_source else by_source,
            running.by_square if square is None else (before[0] + square[0], before[1] + square[1]),
            running.fingerprint
            if batch.fingerprint is None
            else _printed(running.fingerprint, batch.fingerprint),
        )
        if batch.width and self._sampler.due(running.micro_batches):
            if batch.lengths is not None:
                self._sampler.add(batch.lengths, batch.width)
            elif batch.rows is not None and isinstance(batch.valid, int) and batch.valid == batch.computed:
                self._sampler.add(batch.rows, batch.width)
        if batch.trained is None:
            self._awaiting_labels.append(batch.label_sizes)

    def awaits_labels(self, labels_size: int) -> bool:
        """Whether the newest micro-batch still lacks labels, and so many would fit it."""
        return bool(self._awaiting_labels) and labels_size in self._awaiting_labels[-1]

    def count_labels(self, trained: Scalar) -> None:
        """Add the trained tokens of the newest micro-batch, seen on their way into the loss."""
        self._awaiting_labels.pop()
        self._running = self._running._replace(trained=_add(self._running.trained, trained))

    def count_routed(self, routed: int | None) -> None:
        """Add tokens x experts that a gate has chosen for the newest micro-batch."""
        self._running = self._running._replace(routed=_add(self._running.routed, routed))

    def skip_step(self) -> None:
        """The optimizer has left out the step: what was counted for it was computed, and trained nothing."""
        running, before = self._end_micro_batches(), self._committed
        now, then = running.valid, before.valid
        lost = None if now is None or then is None else now - then
        with self._lock:
            self._running = self._committed = running._replace(skipped=_add(running.skipped, lost))

    def step(self) -> int:
        """End the optimizer step and return its number, from 1."""
        running = self._end_micro_batches()
        mark = _Mark(self._step + 1, running, self.clock.seconds())
        with self._lock:
            self._history.append(mark)
            self._step, self._committed = mark.step, running
        return mark.step

    def _end_micro_batches(self) -> _Tally:
        if self._awaiting_labels:
            self._awaiting_labels.clear()
            self._running = self._running._replace(trained=None)
        self.clock.mark()
        return self._running

    def drop_unfinished_step(self) -> None:
        """Forget micro-batches that no step has ended: their run is over."""
        self._awaiting_labels.clear()
        self._running = self._committed

    def reading(self, step: int = 0, *, live: bool = False, final: bool = False) -> Reading | None:
        """Totals at the end of `step`; None while it is not finished.

        A step that is no longer remembered is answered with the oldest one that is; the reading says
        which. `live` gives the newest step not before `step`, with the seconds of this moment. Reads
        device memory: not for the training thread.
        """
        with self._lock:
            marks, committed = list(self._history), self._committed
        if marks[-1].step < step:
            return None
        lengths = self._sampler.read(self.to_host)
        if live or final:
            newest = _Mark(marks[-1].step, committed, self.clock.seconds())
            return self._read(newest, final, lengths)
        return self._read(next(mark for mark in marks if mark.step >= step), final, lengths.by_octave())

    def _read(self, mark: _Mark, final: bool, lengths: Lengths) -> Reading:
        tally = self._on_host(mark.tally)
        positions, text = tally.by_square
        is_told = positions == 0 or int(text) != positions
        if not is_told:
            say_once("square", _NO_PADDING_YET)
            lengths = Lengths()
        valid = read_scalar(tally.valid) if is_told else None
        if is_told and valid is None and tally.valid is not None:
            say_once("unknown", _UNREADABLE_MASK)
        return Reading(
            rank=self.rank,
            step=mark.step,
            micro_batches=tally.micro_batches,
            computed=read_scalar(tally.computed),
            valid=valid,
            trained=read_scalar(tally.trained),
            seconds=mark.seconds,
            final=final,
            skipped=read_scalar(tally.skipped) if is_told else None,
            routed=tally.routed,
            by_source={
                name: (read_scalar(computed), read_scalar(valid) if is_told else None)
                for name, (computed, valid) in tally.by_source.items()
            },
            lengths=lengths,
            place=self._place(tally),
        )

    def _on_host(self, tally: _Tally) -> _Tally:
        """The tally with all scalars of the device read at once."""
        sources = list(tally.by_source.values())
        scalars = [tally.computed, tally.valid, tally.trained, tally.skipped, tally.by_square[1]]
        scalars += [tally.fingerprint[1], *(scalar for source in sources for scalar in source)]
        computed, valid, trained, skipped, text, printed, *rest = self.to_host(scalars)
        return tally._replace(
            computed=computed,
            valid=valid,
            trained=trained,
            skipped=skipped,
            by_square=(tally.by_square[0], text),
            fingerprint=(tally.fingerprint[0], printed),
            by_source=dict(zip(tally.by_source, zip(rest[::2], rest[1::2], strict=True), strict=True)),
        )

    def _place(self, tally: _Tally) -> Place:
        topology = self.topology
        if topology is None:
            return Place()
        printed, value = tally.fingerprint
        known = printed > 0 or tally.micro_batches == 0
        return Place(topology.replica, topology.sequence, (printed, int(value)) if known else None)


def _printed(before: tuple[int, Scalar], more: Scalar) -> tuple[int, Scalar]:
    """The fingerprint of one micro-batch more; which of two came first matters."""
    count, value = before
    return count + 1, value + (count + 1) * more


def _add(total: Any, part: Any) -> Any:
    return None if total is None or part is None else total + part
