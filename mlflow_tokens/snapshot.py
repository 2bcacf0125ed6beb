"""What the sinks write: metric values derived from an account."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mlflow_tokens.account import Account
from mlflow_tokens.clock import PHASES
from mlflow_tokens.lengths import Lengths
from mlflow_tokens.metrics import CHECKPOINT_METRICS, HEARTBEAT_METRICS, TOTALS
from mlflow_tokens.records import SnapshotKind
from mlflow_tokens.statement import padding_cost, straggler_cost
from mlflow_tokens.sums import minus

#: Characters that MLflow does not take in a metric's name, and how much of a source's.
_NOT_IN_NAMES = re.compile(r"[^\w.\- :]")
LONGEST_SOURCE = 100

_TOTALS_BY_NAME = ("cost/phase/", "tokens/source")

#: What tells a stored value of a run from any other: metric, position on the axis, time in ms.
Point = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a sink writes: metric values at one position of the axis.

    It follows from the journal alone, so that writing it again writes the same points. `seq` is the
    number of the record behind it. `high_water`: where the totals are written while the run, after a
    rollback, is below the largest position it has reached (see docs/decisions/0006).
    """

    kind: SnapshotKind
    seq: int
    step: int
    position: int
    timestamp_ms: int
    metrics: Mapping[str, float]
    counts: Mapping[str, int]
    """The exact integers behind the `tokens/*` metrics, for sinks whose floats are short."""
    high_water: int | None = None

    def points(self) -> Iterator[tuple[Point, float]]:
        """Every point to write, with its value."""
        for name, value in self.metrics.items():
            total = name in TOTALS or name.startswith(_TOTALS_BY_NAME)
            position = self.high_water if total and self.high_water is not None else self.position
            yield (name, position, self.timestamp_ms), float(value)


def derive(now: Account, window_start: Account, kind: SnapshotKind, seq: int = 0) -> Snapshot:
    """The snapshot of an account; rates are of the window since `window_start`, the last step snapshot."""
    values = {**_totals(now), **_rates(now, window_start), **(_at_end(now) if kind == "final" else {})}
    names = {"heartbeat": HEARTBEAT_METRICS, "checkpoint": CHECKPOINT_METRICS}.get(kind, tuple(values))
    counts = {f"tokens/{name}": value for name, value in _counts(now).items() if value is not None}
    return Snapshot(
        kind=kind,
        seq=seq,
        step=now.step,
        position=now.position,
        timestamp_ms=round(now.t_wall * 1000),
        metrics={name: value for name in names if (value := values.get(name)) is not None},
        counts=counts,
    )


def _counts(now: Account) -> dict[str, int | None]:
    return {
        "computed": now.computed,
        "valid": now.valid,
        "trained": now.trained,
        "effective": now.effective,
        "skipped": now.skipped or None,
        "routed": now.routed or None,
    }


def _totals(now: Account) -> dict[str, float | None]:
    cost = None if now.cost is None else float(now.cost)
    busy = now.seconds_in("train", "data_wait")
    rolled_back = float(now.cost_of(fate="rolled_back")) if cost is not None and now.fates_known else None
    return {
        **{f"tokens/{name}": value for name, value in _counts(now).items()},
        "throughput/tokens_per_second_average": _ratio(now.computed, now.busy),
        "throughput/tokens_per_second_per_device_average": _ratio(now.computed, busy),
        "throughput/tokens_per_second_wall": _ratio(now.computed, now.elapsed),
        "cost/total": cost,
        "cost/per_million_tokens": _per_million(cost, now.effective),
        "cost/per_million_computed_tokens": _per_million(cost, now.computed),
        "device/hours": now.device_seconds_total / 3600 if now.complete and now.past_known else None,
        "device/gap_hours": now.gap_seconds / 3600 if now.gap_seconds else None,
        "cost/waste/rolled_back": rolled_back or None,
    }


def _at_end(now: Account) -> dict[str, float | None]:
    return {**_phases(now), **_ranks(now), **_rows(now), **_sources(now)}


def _ranks(now: Account) -> dict[str, float | None]:
    """How evenly the ranks went; nothing of waiting where no reader tells of it."""
    train, waited = now.seconds_in("train"), now.seconds_in("data_wait")
    pace, straggler, padding = now.pace, straggler_cost(now), padding_cost(now)
    return {
        "throughput/data_wait_ratio": _ratio(waited, train + waited) if waited else None,
        "throughput/data_wait_ratio_slowest_rank": _ratio(pace.waited, pace.busy)
        if pace and pace.waited
        else None,
        "throughput/step_time_skew": _ratio(pace.step, pace.mean) if pace else None,
        "throughput/slowest_rank": pace.slowest if pace else None,
        "cost/waste/padding": float(padding) if padding else None,
        "cost/waste/straggler": float(straggler) if straggler else None,
    }


def _rows(now: Account) -> dict[str, float | None]:
    """What the rows were like; nothing where valid tokens are unknown, as those of the sample may be."""
    if now.valid is None:
        return {}
    lengths = now.lengths or Lengths()
    return {
        "tokens/valid_ratio": _ratio(now.valid, now.computed or 0),
        "tokens/rank_skew": now.rank_skew,
        "tokens/sequence_length_mean": lengths.mean,
        "tokens/sequence_length_p95": lengths.percentile(0.95),
        # Where there is no padding at all every row is full, which says nothing.
        "tokens/full_row_ratio": lengths.full_ratio if now.valid != now.computed else None,
    }


def _sources(now: Account) -> dict[str, float | None]:
    spelled: dict[str, list[Mapping[str, int]]] = {}
    for name, tokens in (now.by_source or {}).items():
        # Names that MLflow cannot tell apart are one source.
        key = _NOT_IN_NAMES.sub("_", name)[:LONGEST_SOURCE].strip(". ") or "_"
        spelled.setdefault(key, []).append(tokens)
    values: dict[str, float | None] = {}
    for name, parts in spelled.items():
        if all("valid" in tokens for tokens in parts):
            valid = sum(tokens["valid"] for tokens in parts)
            values[f"tokens/source/{name}"] = valid
            if all("computed" in tokens for tokens in parts):
                computed = sum(tokens["computed"] for tokens in parts)
                values[f"tokens/source_valid_ratio/{name}"] = _ratio(valid, computed)
    return values


def _phases(now: Account) -> dict[str, float | None]:
    if now.cost is None:
        return {}
    return {f"cost/phase/{phase}": float(now.cost_of(phase=phase)) or None for phase in PHASES}


def _rates(now: Account, start: Account) -> dict[str, float | None]:
    busy = now.seconds_in("train", "data_wait") - start.seconds_in("train", "data_wait")
    computed, valid = minus(now.computed, start.computed), minus(now.valid, start.valid)
    if not computed:
        # Nothing was trained since (the end of a run, say): the last rate stays the last one.
        return {}
    cost = None if now.cost is None or start.cost is None else float(now.cost - start.cost)
    wall = now.busy - start.busy
    return {
        "throughput/tokens_per_second": _ratio(computed, wall),
        "throughput/valid_tokens_per_second": _ratio(valid, wall),
        "throughput/tokens_per_second_per_device": _ratio(computed, busy),
        "cost/per_million_tokens_recent": _per_million(cost, valid),
    }


def _ratio(amount: float | None, per: float) -> float | None:
    return amount / per if amount is not None and per > 0 else None


def _per_million(cost: float | None, tokens: int | None) -> float | None:
    return 1e6 * cost / tokens if cost is not None and tokens else None
