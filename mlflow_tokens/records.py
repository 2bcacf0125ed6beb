"""What the journal holds: plain quantities and prices, never derived money.

One journal a run. A record is one JSON object; `decode` returns the dataclass that `encode` was given.
Fields that a later version adds have defaults, and a field this version does not know is refused, so
that a number is never read under another meaning (see docs/decisions/0001).
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from mlflow_tokens.lengths import Lengths
from mlflow_tokens.pricing.price import Price

SCHEMA = 1

SnapshotKind = Literal["step", "checkpoint", "heartbeat", "final"]


@dataclass(frozen=True, slots=True)
class SegmentStart:
    """One process lifetime of the job begins.

    allocation: names the stretch for which the machines are held; segments of one allocation share it.
    devices_by_node: devices held on each node; instances are billed a node.
    boot: names the boot of rank 0's machine, within which `t_mono` of two segments can be compared.
    bill_gaps: the time since the segment before is billed even if the machines may have been released.
    """

    segment: str
    allocation: str
    t_wall: float
    world_size: int
    device_type: str
    devices_by_node: tuple[int, ...]
    token_definition: str
    valid_source: str
    topology: str
    version: str
    boot: str = ""
    bill_gaps: bool = False


@dataclass(frozen=True, slots=True)
class RunBound:
    """The run that this journal belongs to; the first thing that a process writes.

    run: its id; None until it has been started. owned: we start and end it, the script does not.
    experiment_id, experiment_name, run_name: where and how a run is to be started that has not been;
    None where MLflow's own default is meant. segment: of the process that says so, which may die before it
    has more to say.
    """

    run: str | None
    tracking_uri: str
    owned: bool = False
    experiment_id: str | None = None
    experiment_name: str | None = None
    run_name: str | None = None
    segment: str = ""


@dataclass(frozen=True, slots=True)
class PriceSet:
    """From here on, and to the end of the segment, the devices cost this much. Several may follow (spot)."""

    t_wall: float
    price: Price


class Fullest(NamedTuple):
    """The data rank with the most valid tokens: which, how many, and how many data ranks there are.

    Ranks that share sequences are one data rank, named by the first of them.
    """

    rank: int
    valid: int
    ranks: int


class Pace(NamedTuple):
    """How evenly the ranks have gone since the segment began.

    slowest: the rank with the most seconds a step, of training and waiting for data, on the host; step: its
    seconds a step; mean: those of all ranks. waiting: the rank that waited longest for data; waited: its
    seconds; busy: those and its seconds of training. ranks: how many there are.
    """

    slowest: int
    step: float
    mean: float
    waiting: int
    waited: float
    busy: float
    ranks: int


@dataclass(frozen=True, slots=True)
class Quantities:
    """Everything counted since the segment began, over all ranks that had reported.

    seq: number of the record in its journal, from 1. step: optimizer step. position: where on the script's
    axis the snapshot is logged.
    t_mono, t_wall: seconds, for differences and for display. elapsed: rank 0's seconds in this segment.
    device_seconds: by device type, then by phase, summed over ranks.
    tokens: by kind (computed, valid, trained); a kind that is unknown is absent. by_source: likewise, of
    each data source. skipped: valid tokens of steps that the optimizer left out; routed: tokens x experts;
    None if unknown. lengths: of a sample of the rows that were fed since the segment began.
    fullest: where there are several data ranks, and their valid tokens are known. pace: where all of several
    ranks have reported, in heartbeats and at the end.
    rewinds: rollbacks and carry-overs in the journal before this record; where one of these was damaged
    on disk the totals are unknown and not wrong.
    """

    segment: str
    seq: int
    kind: SnapshotKind
    step: int
    position: int
    micro_batches: int
    t_mono: float
    t_wall: float
    elapsed: float
    ranks_reporting: int
    tokens: Mapping[str, int]
    device_seconds: Mapping[str, Mapping[str, float]]
    by_source: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    joules: float | None = None
    memory_peak_bytes: int | None = None
    rewinds: int = 0
    skipped: int | None = 0
    routed: int | None = 0
    lengths: Lengths = field(default_factory=Lengths)
    fullest: Fullest | None = None
    pace: Pace | None = None


@dataclass(frozen=True, slots=True)
class Rollback:
    """Training has gone back to a checkpoint: what came after it is no longer part of the model.

    to_segment: the segment in which the checkpoint was saved; "" if only the step is known.
    effective: effective tokens at the checkpoint, where this journal does not hold them itself.
    late: of an answer that came late; see `CarriedOver`.
    """

    segment: str
    t_wall: float
    to_segment: str
    to_step: int
    effective: int | None = None
    late: bool = False


@dataclass(frozen=True, slots=True)
class CarriedOver:
    """Totals that were recorded elsewhere: the run begins with them.

    from_run, from_segment, from_step: where they are from. source: "journal" (of the parent run, as it
    stood at the checkpoint), "history" (of MLflow, where the journal is lost), "unknown" (neither) or
    "unasked" (MLflow has not answered yet).
    tokens: by kind, `effective` too. seconds: device-seconds by device type, then by phase. busy: wall
    seconds of train and data_wait. cells: (phase, fate, amount); None if the cost is unknown.
    high_water: the largest position on the axis that was ever logged, if it is of this run.
    by_source: tokens of each data source, by kind; None if unknown. straggler_seconds: likewise.
    late: an answer that came when the run went on already: it is read in the place of the "unasked" record,
        and a late rollback in that of the rollback after it.
    """

    from_run: str
    from_segment: str
    from_step: int
    source: str
    position: int
    high_water: int
    elapsed: float
    busy: float
    tokens: Mapping[str, int]
    seconds: Mapping[str, Mapping[str, float]]
    currency: str | None = None
    cells: tuple[tuple[str, str, Decimal], ...] | None = None
    gap_seconds: float | None = 0.0
    by_source: Mapping[str, Mapping[str, int]] | None = None
    straggler_seconds: float | None = None
    late: bool = False


@dataclass(frozen=True, slots=True)
class SegmentEnd:
    """The segment ended in a way that could be seen. Status: FINISHED, FAILED or KILLED.

    undelivered: the sinks that had not taken everything by then.
    """

    segment: str
    t_wall: float
    status: str
    undelivered: tuple[str, ...] = ()


Record = SegmentStart | RunBound | PriceSet | Quantities | Rollback | CarriedOver | SegmentEnd

_TYPES: dict[str, type[Any]] = {
    "segment_start": SegmentStart,
    "run": RunBound,
    "price": PriceSet,
    "quantities": Quantities,
    "rollback": Rollback,
    "carried_over": CarriedOver,
    "segment_end": SegmentEnd,
}
_NAMES = {cls: name for name, cls in _TYPES.items()}


def encode(record: Record) -> dict[str, Any]:
    """A JSON-ready mapping."""
    payload = asdict(record)
    if isinstance(record, PriceSet):
        price = record.price
        payload["price"] |= {
            "amount": str(price.amount),
            "date": price.date.isoformat() if price.date else None,
        }
    if isinstance(record, CarriedOver) and record.cells is not None:
        payload["cells"] = [(phase, fate, str(amount)) for phase, fate, amount in record.cells]
    if isinstance(record, Quantities):
        # Most records have none of these: what a default says is not written.
        for name, default in (
            ("by_source", {}),
            ("skipped", 0),
            ("routed", 0),
            ("fullest", None),
            ("pace", None),
        ):
            if payload[name] == default:
                del payload[name]
        if not record.lengths.buckets:
            del payload["lengths"]
    return {"schema": SCHEMA, "record": _NAMES[type(record)], **payload}


def decode(payload: Mapping[str, Any]) -> Record:
    """The record that `encode` was given.

    Raises:
        ValueError: another schema, an unknown record, or fields that do not fit it.
    """
    values = dict(payload)
    schema, name = values.pop("schema", None), values.pop("record", None)
    if schema != SCHEMA:
        raise ValueError(
            f"journal schema {schema!r} is not {SCHEMA}: written by another version of mlflow_tokens"
        )
    cls = _TYPES.get(str(name))
    if cls is None:
        raise ValueError(f"unknown journal record {name!r}")
    unknown = values.keys() - {item.name for item in fields(cls)}
    if unknown:
        raise ValueError(f"journal record {name!r} has unknown fields: {', '.join(sorted(unknown))}")
    if cls is PriceSet:
        price = dict(values["price"])
        price["amount"] = Decimal(price["amount"])
        price["date"] = datetime.date.fromisoformat(price["date"]) if price["date"] else None
        values["price"] = Price(**price)
    if values.get("cells") is not None:
        values["cells"] = tuple((phase, fate, Decimal(amount)) for phase, fate, amount in values["cells"])
    if values.get("fullest") is not None:
        values["fullest"] = Fullest(*values["fullest"])
    if values.get("pace") is not None:
        values["pace"] = Pace(*values["pace"])
    if "lengths" in values:
        lengths = values["lengths"]
        buckets = {int(length): tuple(bucket) for length, bucket in lengths["buckets"].items()}
        values["lengths"] = Lengths(buckets, lengths["width"], lengths["full"])
    for name in values.keys() & {"devices_by_node", "undelivered"}:
        values[name] = tuple(values[name])
    try:
        record: Record = cls(**values)
    except TypeError as error:
        raise ValueError(f"journal record {cls.__name__} lacks fields: {error}") from error
    return record
