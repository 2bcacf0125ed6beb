"""The readings of all ranks added up to the quantities of one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mlflow_tokens.clock import PHASES
from mlflow_tokens.lengths import Lengths, merge, since
from mlflow_tokens.meter import Reading
from mlflow_tokens.notices import say_once
from mlflow_tokens.ranks import Question
from mlflow_tokens.records import Fullest, Pace, Quantities, SegmentStart, SnapshotKind
from mlflow_tokens.topology import ranks_with_tokens

_NO_FINGERPRINTS = (
    "Tokens are unknown: ranks share sequences (sep or context parallel), and it cannot be told whether each "
    "was fed its slice or all of them. Count the batches themselves, on every rank."
)


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

    Every rank has a device, and tokens of its own unless its place says otherwise. A kind of token that one
    rank does not know is unknown for all, and everything is while a rank has never reported.
    """
    own, first = readings[0], baseline.get(0)
    tokens: dict[str, int] = {}
    complete = len(readings) == segment.world_size
    chosen = ranks_with_tokens(readings.values()) if complete else None
    if any(reading.place.sequence and reading.place.fingerprint is None for reading in readings.values()):
        say_once("slices", _NO_FINGERPRINTS)
    holding = {rank: reading for rank, reading in readings.items() if chosen is not None and rank in chosen}
    for kind in ("computed", "valid", "trained") if holding else ():
        if (total := _total(holding, baseline, kind)) is not None:
            tokens[kind] = total
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
        skipped=_total(holding, baseline, "skipped") if holding else None,
        routed=_routed(readings, holding, baseline),
        by_source=_by_source(holding, baseline),
        fullest=_fullest(holding, baseline),
        pace=_pace(readings, baseline) if complete and moment.question.live else None,
        lengths=Lengths() if _are_slices(holding) else _lengths(holding, baseline, fine=moment.question.live),
    )


def _routed(
    readings: Mapping[int, Reading], holding: Mapping[int, Reading], baseline: Mapping[int, Reading]
) -> int | None:
    """Tokens x experts; unknown where ranks share tokens.

    Stages of a pipeline have different gates, and tensor parallel ranks give theirs all tokens or a part.
    """
    if len(holding) == len(readings) and not _are_slices(holding):
        return _total(holding, baseline, "routed")
    return None if not holding or any(reading.routed != 0 for reading in readings.values()) else 0


def _are_slices(readings: Mapping[int, Reading]) -> bool:
    """Whether ranks hold slices of the same sequences: these have no lengths of their own."""
    return any(rank != min(reading.place.sequence, default=rank) for rank, reading in readings.items())


def _fullest(readings: Mapping[int, Reading], baseline: Mapping[int, Reading]) -> Fullest | None:
    valid: dict[int, int] = {}
    for rank, reading in readings.items():
        tokens = _since(reading.valid, baseline.get(rank), "valid")
        if tokens is None:
            return None
        first = min(reading.place.sequence, default=rank)
        valid[first] = valid.get(first, 0) + tokens
    if len(valid) < 2:
        return None
    fullest = max(valid, key=lambda rank: valid[rank])
    return Fullest(fullest, valid[fullest], len(valid))


def _pace(readings: Mapping[int, Reading], baseline: Mapping[int, Reading]) -> Pace | None:
    """None unless there are several ranks, each of which has ended a step."""
    steps, waits, busy = {}, {}, {}
    for rank, reading in readings.items():
        first = baseline.get(rank)
        before = first.seconds if first else dict.fromkeys(PHASES, 0.0)
        steps[rank] = reading.step - (first.step if first else 0)
        waits[rank] = reading.seconds["data_wait"] - before["data_wait"]
        busy[rank] = waits[rank] + reading.seconds["train"] - before["train"]
    if len(steps) < 2 or min(steps.values()) < 1:
        return None
    paces = {rank: seconds / steps[rank] for rank, seconds in busy.items()}
    slowest = max(paces, key=lambda rank: paces[rank])
    waiting = max(waits, key=lambda rank: waits[rank])
    mean = sum(paces.values()) / len(paces)
    numbers = (round(seconds, 6) for seconds in (paces[slowest], mean, waits[waiting], busy[waiting]))
    step, mean, waited, held = numbers
    return Pace(slowest, step, mean, waiting, waited, held, len(paces))


def _total(readings: Mapping[int, Reading], baseline: Mapping[int, Reading], kind: str) -> int | None:
    parts = [_since(getattr(reading, kind), baseline.get(rank), kind) for rank, reading in readings.items()]
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _by_source(readings: Mapping[int, Reading], baseline: Mapping[int, Reading]) -> dict[str, dict[str, int]]:
    """A rank that never had a source has 0 tokens of it; a kind that one rank does not know is left out."""
    found: dict[str, dict[str, int]] = {}
    for name in sorted({name for reading in readings.values() for name in reading.by_source}):
        parts = []
        for rank, reading in readings.items():
            now = reading.by_source.get(name, (0, 0))
            first = baseline[rank].by_source.get(name, (0, 0)) if rank in baseline else (0, 0)
            parts.append([None if a is None or b is None else a - b for a, b in zip(now, first, strict=True)])
        found[name] = {
            kind: sum(column)  # type: ignore[arg-type]
            for kind, column in zip(("computed", "valid"), zip(*parts, strict=True), strict=True)
            if None not in column
        }
    return found


def _lengths(readings: Mapping[int, Reading], baseline: Mapping[int, Reading], *, fine: bool) -> Lengths:
    parts = []
    for rank, reading in readings.items():
        now = reading.lengths
        before = baseline[rank].lengths if rank in baseline else Lengths()
        parts.append(since(now, before) if fine else since(now.by_octave(), before.by_octave()))
    return merge(parts)


def _since(total: int | None, first: Reading | None, kind: str) -> int | None:
    if first is None or total is None:
        return total
    before: int | None = getattr(first, kind)
    return None if before is None else total - before
