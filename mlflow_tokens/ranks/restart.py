"""What is still known when one rank alone was restarted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from mlflow_tokens.clock import PHASES, Phase
from mlflow_tokens.lengths import Lengths
from mlflow_tokens.meter import Reading


class Restarts:
    """Goes on from the last reading of the process before, for ranks whose process was replaced.

    Its seconds are added, and those in between, for which its device was held. Its tokens are unknown from
    then on: what it did after its last reading is lost, and what it does again nobody can tell.
    """

    def __init__(self) -> None:
        self._before: dict[int, Mapping[Phase, float]] = {}
        self._ended: dict[int, float] = {}
        self._waiting: set[int] = set()

    def begin(self, last: Reading, heard: float) -> None:
        """Another process reports for the rank: `last` was said at `heard`, in seconds of rank 0's clock."""
        self._before[last.rank] = last.seconds
        self._ended[last.rank] = heard
        self._waiting.add(last.rank)

    def __contains__(self, rank: int) -> bool:
        return rank in self._before

    def continued(self, reading: Reading, heard: float, sources: Iterable[str]) -> Reading:
        """The reading of a rank that was restarted; sources: of all data that any rank has."""
        rank = reading.rank
        if rank in self._waiting:
            self._waiting.discard(rank)
            apart = max(0.0, heard - self._ended[rank] - sum(reading.seconds.values()))
            before = self._before[rank]
            self._before[rank] = {**before, "restart": before["restart"] + apart}
        before = self._before[rank]
        return replace(
            reading,
            computed=None,
            valid=None,
            trained=None,
            skipped=None,
            routed=None,
            seconds={phase: before[phase] + reading.seconds[phase] for phase in PHASES},
            by_source=dict.fromkeys({*sources, *reading.by_source}, (None, None)),
            lengths=Lengths(),
        )
