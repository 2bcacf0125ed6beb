"""How long the rows of the training data are: a histogram of a sample of them."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Micro-batches that are looked at before only every second one is, every fourth, and so on.
SAMPLES_PER_STRIDE = 512

#: Rows, computed tokens and valid tokens.
Bucket = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Rows by the number of valid tokens in them, scaled up from the sample to all that were fed.

    buckets: by the smallest length that falls into it. A bucket holds one length below 64, and at most 3 %
    of its length from there on.
    width: of the widest row, padding included. full: rows of that width without padding, which may have
    been cut at it.
    """

    buckets: Mapping[int, Bucket] = field(default_factory=dict)
    width: int = 0
    full: int = 0

    @property
    def rows(self) -> int:
        """Rows in all buckets."""
        return sum(rows for rows, _, _ in self.buckets.values())

    @property
    def mean(self) -> float | None:
        """Valid tokens a row."""
        return sum(valid for _, _, valid in self.buckets.values()) / self.rows if self.rows else None

    @property
    def full_ratio(self) -> float | None:
        """Share of the rows that are full at the largest width."""
        return self.full / self.rows if self.rows else None

    def percentile(self, share: float) -> float | None:
        """The length that this share of the rows does not exceed: exact below 64, else a bucket's mean."""
        rest = share * self.rows
        for _, (rows, _, valid) in sorted(self.buckets.items()):
            rest -= rows
            if rest <= 0 and rows:
                return valid / rows
        return None

    def by_octave(self) -> Lengths:
        """The same in few buckets, each twice as wide as the one before: 0, 1, 2-3, 4-7, …"""
        if not any(length & (length - 1) for length in self.buckets):
            return self
        folded = merge(Lengths({octave_of(length): bucket}) for length, bucket in self.buckets.items())
        return Lengths(folded.buckets, self.width, self.full)


def merge(parts: Iterable[Lengths]) -> Lengths:
    """The rows of all parts; full are those of the widest."""
    parts = list(parts)
    found: dict[int, list[Bucket]] = {}
    for part in parts:
        for length, bucket in part.buckets.items():
            found.setdefault(length, []).append(bucket)
    buckets: dict[int, Bucket] = {
        length: (
            sum([rows for rows, _, _ in several]),
            sum([computed for _, computed, _ in several]),
            sum([valid for _, _, valid in several]),
        )
        for length, several in found.items()
    }
    width = max((part.width for part in parts), default=0)
    full = sum(part.full for part in parts if part.width == width)
    return Lengths(buckets, width, full)


def since(now: Lengths, before: Lengths) -> Lengths:
    """The rows of `now` that are not in `before`, of an earlier moment of the same process."""
    if not before.buckets:
        return now
    buckets = {}
    for length, bucket in now.buckets.items():
        rows, computed, valid = before.buckets.get(length, (0, 0, 0))
        if bucket[0] > rows:
            buckets[length] = (bucket[0] - rows, bucket[1] - computed, bucket[2] - valid)
    return Lengths(buckets, now.width, now.full - (before.full if before.width == now.width else 0))


def bucket_of(length: int) -> int:
    """The smallest length in the same bucket: its first six binary digits count."""
    shift = max(0, length.bit_length() - 6)
    return length >> shift << shift


def octave_of(length: int) -> int:
    """The largest power of two that is not above the length; 0 for 0."""
    return 1 << (length.bit_length() - 1) if length else 0


#: Gives the same scalars and arrays, in host memory where it can.
ToHost = Callable[[Sequence[Any]], Sequence[Any]]


class LengthSampler:
    """Keeps the lengths of some micro-batches on the device until another thread reads them.

    The training thread asks `due` and calls `add`; `read` is for any thread, and is where device memory
    is read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Any, int, int]] = deque()
        self._taken = 0
        self._stride = 1
        self._lengths = Lengths()

    def due(self, micro_batch: int) -> bool:
        """Whether this micro-batch, by its number, belongs to the sample."""
        return micro_batch % self._stride == 0

    def add(self, lengths: Any, width: int) -> None:
        """Add the rows of a micro-batch: valid tokens of each, an array, and positions of each.

        A number in the array's place is that of rows without padding.
        """
        self._waiting.append((lengths, width, self._stride))
        self._taken += 1
        if self._taken % SAMPLES_PER_STRIDE == 0:
            self._stride *= 2

    def read(self, to_host: ToHost = list) -> Lengths:
        """The histogram so far. Reads device memory: not for the training thread.

        to_host: brings arrays from the device, where it can.
        """
        with self._lock:
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if waiting:
                arrays = to_host([lengths for lengths, _, _ in waiting])
                counted = [
                    _counted(lengths, width, weight)
                    for lengths, (_, width, weight) in zip(arrays, waiting, strict=True)
                ]
                self._lengths = merge([self._lengths, *counted])
            return self._lengths


def _counted(lengths: Any, width: int, weight: int) -> Lengths:
    buckets: dict[int, Bucket] = {}
    counted = Counter({width: lengths}) if isinstance(lengths, int) else Counter(lengths.tolist())
    for length, rows in counted.items():
        if length < 0:  # of a mask that cannot be read
            continue
        key, more = bucket_of(length), rows * weight
        before = buckets.get(key, (0, 0, 0))
        buckets[key] = (before[0] + more, before[1] + more * width, before[2] + more * length)
    return Lengths(buckets, width, counted[width] * weight)
