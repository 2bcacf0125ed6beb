"""Which ranks of a job hold tokens of their own, and which repeat or share those of others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

#: Axes along which ranks are fed different data; along every other one they are fed the same.
DATA_AXES = ("data", "sharding")
#: Axes along which ranks work on slices of the same sequences.
SEQUENCE_AXES = ("sep", "context")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands in the job's parallelism.

    replica: another rank is fed the same tokens (tensor and pipeline parallel ranks but the first).
    sequence: the ranks that work on the same sequences, this one included; empty if it is alone.
    fingerprint: micro-batches that went into it, and a number that depends on their ids and order.
    """

    replica: bool = False
    sequence: tuple[int, ...] = ()
    fingerprint: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the parallel axes, and this rank's coordinate on each.

    sizes, coordinates: by axis (data, sharding, tensor, pipeline, sep, context); an axis that is left out
    has one rank. ranks: of the whole job.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    coordinates: Mapping[str, int] = field(default_factory=dict)
    sequence: tuple[int, ...] = ()

    @property
    def replica(self) -> bool:
        """Whether another rank is fed the same tokens."""
        return any(
            coordinate
            for axis, coordinate in self.coordinates.items()
            if axis not in DATA_AXES and axis not in SEQUENCE_AXES
        )

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "one rank"


class _Placed(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def place(self) -> Place: ...


def ranks_with_tokens(readings: Iterable[_Placed]) -> frozenset[int] | None:
    """The ranks whose tokens add up to the job's; None while that is not known.

    Ranks that share sequences hold slices if their fingerprints of as many micro-batches differ; if these
    are equal they were all fed the whole sequences, and the first one's count.
    """
    holding = {reading.rank: reading.place for reading in readings if not reading.place.replica}
    chosen: set[int] = set()
    for rank, place in holding.items():
        sliced = True
        if place.sequence:
            if not all(other in holding for other in place.sequence):
                return None
            found = _are_slices([holding[other] for other in place.sequence])
            if found is None:
                return None
            sliced = found
        if sliced or rank == min(place.sequence):
            chosen.add(rank)
    return frozenset(chosen)


def _are_slices(places: list[Place]) -> bool | None:
    prints = {place.fingerprint for place in places}
    if None in prints or len({count for count, _ in filter(None, prints)}) != 1:
        return None
    return len(prints) > 1
