"""Which ranks of a job hold tokens of their own, and which repeat or share those of others."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


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
    """The parallel axes of a job, and what this rank's coordinates on them mean.

    sizes: ranks along data, sharding, sep, context, tensor and pipeline. Ranks are fed different data along
    data and sharding, and the same along tensor and pipeline. Context ranks are sharding ranks as well.
    replica, sequence: as in `Place`.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    replica: bool = False
    sequence: tuple[int, ...] = ()

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "data 1"


def topology_of_process() -> Topology | None:
    """What fleet says of this process; None without fleet, or before `fleet.init`.

    Looks at fleet where the script has loaded it, and loads nothing.
    """
    fleet = sys.modules.get("paddle.distributed.fleet")
    if fleet is None:
        return None
    try:
        group = fleet.get_hybrid_communicate_group()
    except (AttributeError, AssertionError):
        return None
    return topology_of(group)


def topology_of(group: Any) -> Topology:
    """Read Paddle's HybridCommunicateGroup, or one with expert parallelism, which adds context ranks.

    Experts are spread over data and sharding ranks, whose tokens are their own.
    """
    context = getattr(group, "get_context_parallel_world_size", lambda: 1)()
    sep = group.get_sep_parallel_world_size()
    sizes = {
        "data": group.get_data_parallel_world_size(),
        "sharding": group.get_sharding_parallel_world_size(),
        "sep": sep,
        "context": context,
        "tensor": group.get_model_parallel_world_size(),
        "pipeline": group.get_pipe_parallel_world_size(),
    }
    sequence: list[int] = []
    if sep > 1:
        sequence = group.get_sep_parallel_group().ranks
    elif context > 1:
        sequence = group.get_context_parallel_group().ranks
    replica = bool(group.get_model_parallel_rank() or group.get_stage_id())
    return Topology(sizes, replica, tuple(sequence))


def topology_of_tensor(tensor: Any, rank: int) -> Topology:
    """How a tensor of Paddle's auto parallel is spread: processes along a dimension of its mesh hold parts of
    it, or the same.
    """
    mesh = tensor.process_mesh
    sizes = {"data": 1, "tensor": 1}
    replica = rank not in mesh.process_ids
    # Where the rank stands in the mesh, whose processes are listed row by row.
    rest = 0 if replica else mesh.process_ids.index(rank)
    for extent, placement in reversed(list(zip(mesh.shape, tensor.placements, strict=True))):
        rest, coordinate = divmod(rest, extent)
        sizes["data" if placement.is_shard() else "tensor"] *= extent
        replica = replica or (coordinate > 0 and not placement.is_shard())
    return Topology(sizes, replica)


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
