"""The complete list of metrics: names, units, denominators; and how each follows from the account."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from mlflow_tokens.account import Account
from mlflow_tokens.clock import PHASES
from mlflow_tokens.lengths import Lengths
from mlflow_tokens.records import SCHEMA, SnapshotKind

#: Value of the tag `mlflow_tokens.schema`: names and meanings of everything logged.
METRICS_SCHEMA = str(SCHEMA)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric's name, unit and definition.

    logged: "snapshot" at every snapshot, "end" with the last one, "reserved": the name is fixed, but
    nothing logs it yet.
    """

    name: str
    unit: str
    definition: str
    definition_zh: str
    logged: Literal["snapshot", "end", "reserved"] = "snapshot"


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "tokens/computed",
        "tokens",
        "positions fed to the model, padding included",
        "送入模型的位置数，含填充",
    ),
    MetricSpec("tokens/valid", "tokens", "computed minus padding", "computed 减去填充"),
    MetricSpec(
        "tokens/trained",
        "tokens",
        "labels other than ignore_index, as handed to the model or the loss",
        "标签不等于 ignore_index 的位置数（以传入模型或损失函数的标签为准）",
    ),
    MetricSpec(
        "tokens/effective",
        "tokens",
        "valid tokens of steps that were neither skipped nor rolled back by a restart",
        "未被跳过、也未因重启回滚的步的有效词元",
    ),
    MetricSpec(
        "throughput/tokens_per_second",
        "tokens/s",
        "computed / (train + data_wait) since the last snapshot",
        "自上一快照起：computed /（训练＋等待数据）时间",
    ),
    MetricSpec(
        "throughput/tokens_per_second_average",
        "tokens/s",
        "computed / (train + data_wait) since the start",
        "自开始起：computed /（训练＋等待数据）时间",
    ),
    MetricSpec(
        "throughput/valid_tokens_per_second",
        "tokens/s",
        "valid / (train + data_wait) since the last snapshot",
        "自上一快照起：valid /（训练＋等待数据）时间",
    ),
    MetricSpec(
        "throughput/tokens_per_second_per_device",
        "tokens/s",
        "tokens_per_second / devices, since the last snapshot",
        "自上一快照起：每设备每秒词元",
    ),
    MetricSpec(
        "throughput/tokens_per_second_per_device_average",
        "tokens/s",
        "tokens_per_second_average / devices",
        "自开始起：每设备每秒词元",
    ),
    MetricSpec(
        "throughput/tokens_per_second_wall",
        "tokens/s",
        "computed / all wall time since the process started",
        "computed / 进程启动以来的全部时间",
    ),
    MetricSpec("cost/total", "currency", "device time held x price", "占用设备时间 × 单价"),
    MetricSpec(
        "cost/per_million_tokens",
        "currency / 1e6 tokens",
        "1e6 x cost/total / tokens/effective; absent if valid tokens are unknown",
        "1e6 × cost/total / tokens/effective；有效词元未知时不记录",
    ),
    MetricSpec(
        "cost/per_million_computed_tokens",
        "currency / 1e6 tokens",
        "1e6 x cost/total / tokens/computed",
        "1e6 × cost/total / tokens/computed",
    ),
    MetricSpec(
        "cost/per_million_tokens_recent",
        "currency / 1e6 tokens",
        "1e6 x cost / valid tokens, both since the last snapshot",
        "自上一快照起：1e6 × 成本 / 有效词元",
    ),
    MetricSpec("device/hours", "device-hours", "hours x devices held", "占用设备数 × 小时"),
    MetricSpec(
        "device/gap_hours",
        "device-hours",
        "hours x devices between two allocations of a resumed run: not billed, and not in device/hours",
        "续训的两次分配之间的设备小时：不计费，也不计入 device/hours",
    ),
    MetricSpec(
        "cost/waste/rolled_back",
        "currency",
        "cost of work that a restart from an earlier checkpoint threw away; logged once there is any",
        "因从更早的检查点重启而作废的工作的成本；出现后开始记录",
    ),
    MetricSpec(
        "cost/phase/<phase>",
        "currency",
        "cost of the time spent in a phase, rolled back or not; they add up to cost/total",
        "某阶段时间的成本（含已回滚部分）；各阶段之和为 cost/total",
        "end",
    ),
    MetricSpec(
        "tokens/skipped",
        "tokens",
        "valid tokens of steps that the optimizer left out (GradScaler found inf); logged once there are any",
        "优化器跳过的步（GradScaler 发现 inf）中的有效词元；出现后开始记录",
    ),
    MetricSpec(
        "tokens/routed",
        "tokens x experts",
        "computed tokens x experts that the gates of MoE layers chose; logged once there are any",
        "MoE 门控选择的词元 × 专家数；出现后开始记录",
    ),
    MetricSpec("tokens/valid_ratio", "fraction", "valid / computed", "valid / computed", "end"),
    MetricSpec(
        "tokens/sequence_length_mean",
        "tokens",
        "valid tokens a row, of a sample of the rows since the last (re)start",
        "每行有效词元均值（自上次启动以来的行抽样）",
        "end",
    ),
    MetricSpec(
        "tokens/sequence_length_p95",
        "tokens",
        "95th percentile of the same; to 3 % from 64 tokens on",
        "同上，95 分位（64 词元以上精确到 3 %）",
        "end",
    ),
    MetricSpec(
        "tokens/full_row_ratio",
        "fraction",
        "share of the same rows that fill the widest batch without padding: at most these were cut",
        "同上，恰好填满最大宽度、无填充的行的占比：被截断的行至多这么多",
        "end",
    ),
    MetricSpec(
        "tokens/rank_skew",
        "ratio",
        "max / mean of valid tokens over data ranks, since the last (re)start",
        "各数据 rank 有效词元的最大值 / 均值（自上次启动以来）",
        "end",
    ),
    MetricSpec(
        "tokens/source/<name>", "tokens", "valid tokens of a data source", "某数据来源的有效词元", "end"
    ),
    MetricSpec(
        "tokens/source_valid_ratio/<name>",
        "fraction",
        "valid / computed of a data source",
        "某数据来源的 valid / computed",
        "end",
    ),
    MetricSpec(
        "throughput/mfu", "fraction", "model FLOP/s / peak FLOP/s", "模型 FLOP/s / 峰值 FLOP/s", "reserved"
    ),
    MetricSpec(
        "energy/kwh", "kWh", "energy of the devices, not of the site", "设备（非机房）用电量", "reserved"
    ),
    MetricSpec(
        "energy/joules_per_token",
        "J/token",
        "device energy / effective tokens",
        "设备能耗 / 有效词元",
        "reserved",
    ),
    MetricSpec(
        "progress/goal_fraction", "fraction", "effective tokens / goal", "有效词元 / 目标", "reserved"
    ),
    MetricSpec("cost/waste/<kind>", "currency", "padding, straggler", "填充、慢节点的成本", "reserved"),
    MetricSpec(
        "device/memory_peak_gib", "GiB", "largest memory in use on a device", "单设备显存峰值", "reserved"
    ),
    MetricSpec(
        "device/utilization_mean", "fraction", "mean utilisation of the devices", "设备平均利用率", "reserved"
    ),
)

#: Metrics of the whole run so far, as opposed to those of the window since the last snapshot.
TOTALS = frozenset(
    {
        *(f"tokens/{kind}" for kind in ("computed", "valid", "trained", "effective", "skipped", "routed")),
        "throughput/tokens_per_second_average",
        "throughput/tokens_per_second_per_device_average",
        "throughput/tokens_per_second_wall",
        "cost/total",
        "cost/per_million_tokens",
        "cost/per_million_computed_tokens",
        "device/hours",
        "device/gap_hours",
        "cost/waste/rolled_back",
    }
)

#: Characters that MLflow takes in a metric's name, and how much of a source's.
_NOT_IN_NAMES = re.compile(r"[^\w.\- :]")
LONGEST_SOURCE = 100

_TOTALS_BY_NAME = ("cost/phase/", "tokens/source")

#: What a checkpoint logs: enough to resume from MLflow's history where the journal is lost.
CHECKPOINT_METRICS = (
    *(f"tokens/{kind}" for kind in ("computed", "valid", "trained", "effective")),
    "cost/total",
    "device/hours",
    "throughput/tokens_per_second_average",
    "throughput/tokens_per_second_per_device_average",
    "throughput/tokens_per_second_wall",
)

#: What a heartbeat logs: the numbers that grow while nothing is trained.
HEARTBEAT_METRICS = ("cost/total", "device/hours", "throughput/tokens_per_second_wall")


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
    return {**_phases(now), **_rows(now), **_sources(now)}


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
    computed, valid = _minus(now.computed, start.computed), _minus(now.valid, start.valid)
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


def _minus(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before
