"""A fake of fleet's hybrid communicate group: Paddle's own coordinates, and no processes behind them.

For topologies of hundreds of ranks, which no machine at hand can run.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paddle.distributed.fleet.base.topology import CommunicateTopology


class FakeHybridGroup:
    """What `fleet.get_hybrid_communicate_group()` answers on one rank, as far as we ask it."""

    def __init__(self, topology: CommunicateTopology, rank: int) -> None:
        self._topology, self._rank = topology, rank
        self.coordinate = topology.get_coord(rank)

    def _size(self, axis: str) -> int:
        return int(self._topology.get_dim(axis)) if axis in self._topology.get_hybrid_group_names() else 1

    def _group(self, axis: str) -> Any:
        (ranks,) = [ranks for ranks in self._topology.get_comm_list(axis) if self._rank in ranks]
        return SimpleNamespace(ranks=list(ranks))

    def get_data_parallel_world_size(self) -> int:
        return self._size("data")

    def get_sharding_parallel_world_size(self) -> int:
        # With context parallelism sharding ranks are context ranks as well.
        return self._size("sharding") * self._size("cp_sharding") * self._size("context")

    def get_sep_parallel_world_size(self) -> int:
        return self._size("sep")

    def get_sep_parallel_group(self) -> Any:
        return self._group("sep")

    def get_model_parallel_world_size(self) -> int:
        return self._size("model")

    def get_model_parallel_rank(self) -> int:
        return int(self.coordinate.model)

    def get_pipe_parallel_world_size(self) -> int:
        return self._size("pipe")

    def get_stage_id(self) -> int:
        return int(self.coordinate.pipe)


class FakeExpertGroup(FakeHybridGroup):
    """The same of a job with expert and context parallelism."""

    def get_context_parallel_world_size(self) -> int:
        return self._size("context")

    def get_context_parallel_group(self) -> Any:
        return self._group("context")
