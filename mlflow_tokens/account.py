"""The account: a pure fold over the journal. Quantities in, totals and money out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import reduce
from typing import Literal

from mlflow_tokens.pricing.price import Price
from mlflow_tokens.records import PriceSet, Quantities, Record, SegmentStart

Fate = Literal["surviving", "rolled_back"]

#: Seconds by device type and phase, over all ranks.
DeviceSeconds = Mapping[tuple[str, str], float]


@dataclass(frozen=True, slots=True)
class Account:
    """State of a run after some of its records. None means unknown.

    device_seconds: by (device type, phase), all segments together.
    cells: money by (phase, fate) in `currency`; they add up to `cost` exactly.
    unpriced_seconds: device-seconds for which no price was known; cost is unknown unless it is 0.
    """

    step: int = 0
    position: int = 0
    t_wall: float = 0.0
    elapsed: float = 0.0
    computed: int | None = 0
    valid: int | None = 0
    trained: int | None = 0
    device_seconds: DeviceSeconds = field(default_factory=dict)
    cells: Mapping[tuple[str, Fate], Decimal] = field(default_factory=dict)
    currency: str | None = None
    unpriced_seconds: float = 0.0
    ranks_reporting: int = 0
    segment: SegmentStart | None = None
    price: Price | None = None
    mixed_currencies: bool = False
    before_segment: Account | None = None
    """The account when the running segment began: its own quantities are added to these."""

    @property
    def effective(self) -> int | None:
        """Valid tokens of the surviving history. Nothing rolls back yet, so these are the valid tokens."""
        return self.valid

    @property
    def complete(self) -> bool:
        """Whether every rank is in these numbers (as far as there are any)."""
        return self.segment is None or self.ranks_reporting in (0, self.segment.world_size)

    @property
    def cost(self) -> Decimal | None:
        """The sum of the cells, or None where a price or the device time of a rank is missing."""
        if self.currency is None or self.unpriced_seconds > 0 or self.mixed_currencies:
            return None
        if not self.complete:
            return None
        return sum(self.cells.values(), Decimal(0))

    def seconds_in(self, *phases: str) -> float:
        """Device-seconds spent in these phases, all device types."""
        return sum(seconds for (_, phase), seconds in self.device_seconds.items() if phase in phases)

    @property
    def device_seconds_total(self) -> float:
        """All device-seconds held so far."""
        return sum(self.device_seconds.values())


def fold(account: Account, record: Record) -> Account:
    """The account after one more record."""
    if isinstance(record, SegmentStart):
        # What the devices of a new segment cost has to be said anew.
        before = replace(account, before_segment=None)
        return replace(account, segment=record, price=None, before_segment=before)
    if isinstance(record, PriceSet):
        currency = record.price.currency
        mixed = account.mixed_currencies or account.currency not in (None, currency)
        return replace(
            account, price=record.price, currency=account.currency or currency, mixed_currencies=mixed
        )
    if isinstance(record, Quantities):
        return _add_quantities(account, record)
    return account


def account_of(records: Iterable[Record]) -> Account:
    """Fold a whole journal."""
    return reduce(fold, records, Account())


def _add_quantities(account: Account, record: Quantities) -> Account:
    before, segment = account.before_segment, account.segment
    if before is None or segment is None or segment.segment != record.segment:
        raise ValueError(f"quantities of segment {record.segment!r} come before its start")
    held = _merge(before.device_seconds, record.device_seconds)
    cells, unpriced = dict(account.cells), account.unpriced_seconds
    for key, seconds in held.items():
        # A stretch may turn out to have been of another phase: a phase can shrink, the sum cannot.
        newly_held = seconds - account.device_seconds.get(key, 0.0)
        if account.price is None:
            unpriced += newly_held
            continue
        cell: tuple[str, Fate] = (key[1], "surviving")
        rate = account.price.per_device_second(segment.devices_by_node)
        cells[cell] = cells.get(cell, Decimal(0)) + rate * Decimal(str(newly_held))
    return replace(
        account,
        step=record.step,
        position=record.position,
        t_wall=record.t_wall,
        elapsed=before.elapsed + record.elapsed,
        computed=_plus(before.computed, record.tokens.get("computed")),
        valid=_plus(before.valid, record.tokens.get("valid")),
        trained=_plus(before.trained, record.tokens.get("trained")),
        device_seconds=held,
        cells=cells,
        unpriced_seconds=unpriced,
        ranks_reporting=record.ranks_reporting,
    )


def _merge(before: DeviceSeconds, segment: Mapping[str, Mapping[str, float]]) -> dict[tuple[str, str], float]:
    total = dict(before)
    for device_type, phases in segment.items():
        for phase, seconds in phases.items():
            key = (device_type, phase)
            total[key] = total.get(key, 0.0) + seconds
    return total


def _plus(before: int | None, segment: int | None) -> int | None:
    return None if before is None or segment is None else before + segment
