"""The readings of all ranks added up to the quantities of one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mlflow_tokens.clock import PHASES
from mlflow_tokens.meter import Reading
from mlflow_tokens.ranks import Question
from mlflow_tokens.records import Quantities, SegmentStart, SnapshotKind


class Moment(NamedTuple):
    """A snapshot to be taken: the totals asked for, and its position on the axis.

    status: how the run ends, of a final one.
    """

    kind: SnapshotKind
    question: Question
    position: int
    t_wall: float
    t_mono: float
    status: str = "FINISHED"


@dataclass(frozen=True, slots=True)
class Past:
    """What the run had before this segment: its optimizer step, and the rewinds in its journal.

    resumed: it was trained before, so what comes before its first step now is a restart.
    """

    step: int = 0
    rewinds: int = 0
    resumed: bool = False


def quantities(
    readings: Mapping[int, Reading],
    *,
    segment: SegmentStart,
    seq: int,
    moment: Moment,
    baseline: Mapping[int, Reading],
    past: Past,
) -> Quantities:
    """Add up the readings of all ranks, less what each had when the run began.

    Every rank holds tokens of its own (data parallel), and a device each. A kind of token that one
    rank does not know is unknown for all, and everything is while a rank has never reported.
    """
    own, first = readings[0], baseline.get(0)
    tokens: dict[str, int] = {}
    complete = len(readings) == segment.world_size
    for kind in ("computed", "valid", "trained") if complete else ():
        parts = [
            _since(getattr(reading, kind), baseline.get(rank), kind) for rank, reading in readings.items()
        ]
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            tokens[kind] = sum(known)
    seconds = {
        phase: round(
            sum(
                reading.seconds[phase] - (baseline[rank].seconds[phase] if rank in baseline else 0.0)
                for rank, reading in readings.items()
            ),
            6,
        )
        for phase in PHASES
    }
    if past.resumed:
        seconds["restart"] += seconds["startup"]
        seconds["startup"] = 0.0
    return Quantities(
        segment=segment.segment,
        seq=seq,
        kind=moment.kind,
        step=past.step + own.step - (first.step if first else 0),
        position=moment.position,
        micro_batches=own.micro_batches - (first.micro_batches if first else 0),
        t_mono=moment.t_mono,
        t_wall=moment.t_wall,
        elapsed=round(sum(own.seconds.values()) - (sum(first.seconds.values()) if first else 0.0), 6),
        ranks_reporting=len(readings),
        tokens=tokens,
        device_seconds={segment.device_type: {phase: held for phase, held in seconds.items() if held}},
        rewinds=past.rewinds,
    )


def _since(total: int | None, first: Reading | None, kind: str) -> int | None:
    if first is None or total is None:
        return total
    before: int | None = getattr(first, kind)
    return None if before is None else total - before
