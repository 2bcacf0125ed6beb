"""Sums of quantities of which some are unknown (None): what has an unknown part is unknown."""

from __future__ import annotations

from collections.abc import Mapping

from mlflow_tokens.records import Quantities

#: Seconds by device type and phase, over all ranks.
DeviceSeconds = Mapping[tuple[str, str], float]
#: By kind: computed and valid.
SourceTokens = Mapping[str, int]


def busy(record: Quantities) -> float:
    busy = sum(
        phases.get(phase, 0.0)
        for phases in record.device_seconds.values()
        for phase in ("train", "data_wait")
    )
    return busy / (record.ranks_reporting or 1)


def merge(before: DeviceSeconds, segment: Mapping[str, Mapping[str, float]]) -> dict[tuple[str, str], float]:
    total = dict(before)
    for device_type, phases in segment.items():
        for phase, seconds in phases.items():
            key = (device_type, phase)
            total[key] = total.get(key, 0.0) + seconds
    return total


def add_sources(
    before: Mapping[str, SourceTokens] | None, segment: Mapping[str, SourceTokens]
) -> Mapping[str, SourceTokens] | None:
    """A kind that is missing on one side of a source is unknown, unless that side has no such source."""
    if before is None or not segment:
        return before
    total = dict(before)
    for name, tokens in segment.items():
        earlier = before.get(name)
        total[name] = (
            tokens
            if earlier is None
            else {kind: earlier[kind] + tokens[kind] for kind in earlier.keys() & tokens.keys()}
        )
    return total


def skew(record: Quantities) -> float | None:
    valid = record.tokens.get("valid")
    return record.fullest.valid * record.fullest.ranks / valid if record.fullest and valid else None


def minus(whole: int | None, part: int | None) -> int | None:
    return None if whole is None or part is None else whole - part


def plus(before: int | None, segment: int | None) -> int | None:
    return None if before is None or segment is None else before + segment


def stragglers(so_far: float | None, before: float | None, record: Quantities, ranks: int) -> float | None:
    """Device-seconds of waiting for another rank's data, with those `before` the segment.

    In every step all ranks wait for the one whose data comes last: at least as long as the one that has
    waited longest of all.
    """
    if record.pace is None and record.kind not in ("heartbeat", "final"):
        return so_far
    if ranks == 1 or before is None:
        return before
    if record.pace is None:
        return None
    waited = sum(phases.get("data_wait", 0.0) for phases in record.device_seconds.values())
    return before + max(0.0, record.pace.waited * record.pace.ranks - waited)
