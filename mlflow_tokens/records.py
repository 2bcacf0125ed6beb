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
from typing import Any, Literal

from mlflow_tokens.pricing.price import Price

SCHEMA = 1

SnapshotKind = Literal["step", "heartbeat", "final"]


@dataclass(frozen=True, slots=True)
class SegmentStart:
    """One process lifetime of the job begins.

    allocation: names the stretch for which the machines are held; segments of one allocation share it.
    devices_by_node: devices held on each node; instances are billed a node.
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


@dataclass(frozen=True, slots=True)
class RunBound:
    """The run that this journal belongs to, once it is known where it is kept."""

    run: str
    tracking_uri: str


@dataclass(frozen=True, slots=True)
class PriceSet:
    """From here on, and to the end of the segment, the devices cost this much. Several may follow (spot)."""

    t_wall: float
    price: Price


@dataclass(frozen=True, slots=True)
class Quantities:
    """Everything counted since the segment began, over all ranks that had reported.

    seq: number of the record in its journal, from 1. step: optimizer step. position: where on the script's
    axis the snapshot is logged.
    t_mono, t_wall: seconds, for differences and for display. elapsed: rank 0's seconds in this segment.
    device_seconds: by device type, then by phase, summed over ranks.
    tokens: by kind (computed, valid, trained); a kind that is unknown is absent. by_source: likewise.
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


@dataclass(frozen=True, slots=True)
class SegmentEnd:
    """The segment ended in a way that could be seen. Status: FINISHED, FAILED or KILLED."""

    segment: str
    t_wall: float
    status: str


Record = SegmentStart | RunBound | PriceSet | Quantities | SegmentEnd

_TYPES: dict[str, type[Any]] = {
    "segment_start": SegmentStart,
    "run": RunBound,
    "price": PriceSet,
    "quantities": Quantities,
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
    if cls is SegmentStart:
        values["devices_by_node"] = tuple(values["devices_by_node"])
    try:
        record: Record = cls(**values)
    except TypeError as error:
        raise ValueError(f"journal record {name!r} lacks fields: {error}") from error
    return record
