"""The complete list of metrics: names, units, denominators; and how each follows from the account."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlflow_tokens.records import SCHEMA

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
        "throughput/data_wait_ratio",
        "fraction",
        "data_wait / (train + data_wait), all ranks; where Paddle's readers load the data",
        "所有 rank：等待数据 /（训练＋等待数据）时间（数据由 Paddle 的读取器加载时）",
        "end",
    ),
    MetricSpec(
        "throughput/data_wait_ratio_slowest_rank",
        "fraction",
        "the same of the rank that has waited longest since the last (re)start",
        "同上，自上次启动以来等待最久的 rank",
        "end",
    ),
    MetricSpec(
        "throughput/step_time_skew",
        "ratio",
        "max / mean over ranks of seconds a step on the host, since the last (re)start; "
        "near 1 where ranks wait for each other",
        "各 rank 主机侧每步秒数的最大值 / 均值（自上次启动以来）；各 rank 互相等待时接近 1",
        "end",
    ),
    MetricSpec("throughput/slowest_rank", "rank", "the rank of that maximum", "取得该最大值的 rank", "end"),
    MetricSpec(
        "cost/waste/padding",
        "currency",
        "of training that is left: the share of padding",
        "留存的训练成本中填充所占的部分",
        "end",
    ),
    MetricSpec(
        "cost/waste/straggler",
        "currency",
        "of training: devices waiting, at least, for another rank's data; of ranks that step together",
        "训练成本中：设备至少花在等待其他 rank 数据上的部分（各 rank 同步训练时）",
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
        "cost/waste/padding",
        "cost/waste/straggler",
    }
)

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
