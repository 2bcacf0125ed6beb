"""The account: a pure fold over the journal. Quantities in, totals and money out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import reduce
from typing import Literal

from mlflow_tokens.lengths import Lengths
from mlflow_tokens.pricing.price import Price
from mlflow_tokens.records import CarriedOver, Pace, PriceSet, Quantities, Record, Rollback, SegmentStart
from mlflow_tokens.sums import (
    DeviceSeconds,
    SourceTokens,
    add_sources,
    busy,
    merge,
    minus,
    plus,
    skew,
    stragglers,
)

Fate = Literal["surviving", "rolled_back"]

Cells = Mapping[tuple[str, Fate], Decimal]

#: Phases that no rollback takes back: they made no part of a model.
OVERHEAD = ("startup", "restart")


@dataclass(frozen=True, slots=True)
class Milestone:
    """What a checkpoint of this step is worth: a rollback goes back to it.

    surviving: money by phase, of the phases that a rollback can take back.
    """

    segment: str
    step: int
    position: int
    effective: int | None
    surviving: Mapping[str, Decimal]


@dataclass(frozen=True, slots=True)
class Account:
    """State of a run after some of its records. None means unknown.

    busy: wall seconds of train and data_wait. high_water: the largest position on the axis so far.
    rolled_back: valid tokens that a rollback took from the history; None if unknown.
    skipped: valid tokens of steps that the optimizer left out. routed: tokens x experts.
    by_source: tokens by data source and kind. lengths: of the rows since the segment began, as finely as
        its last live record had them.
    rank_skew: valid tokens of the fullest data rank over the mean of all, since the segment began;
        fullest_rank: which one. pace: of the ranks, likewise. None where there are not several.
    straggler_seconds: device-seconds, at least, in which devices waited for the data of another rank; None
        if it is not known for a segment of several ranks.
    device_seconds: by (device type, phase), all segments together.
    gap_seconds: device-seconds between allocations, when the machines may have been released; not billed;
        None if unknown.
    cells: money by (phase, fate) in `currency`; they add up to `cost` exactly.
    fates_known: False after a rollback to a step of which the money is not known.
    past_known: False if the run has a past of which nothing is known, neither tokens nor money, or an
        earlier segment of which the device time of a rank is not.
    price: of the devices now; prices: all that there were, in their order. carried: the run began with
        money of another record, whose prices are not here.
    unpriced_seconds: device-seconds for which no price was known; cost is unknown unless it is 0.
    """

    step: int = 0
    position: int = 0
    high_water: int = 0
    t_wall: float = 0.0
    t_mono: float = 0.0
    elapsed: float = 0.0
    busy: float = 0.0
    computed: int | None = 0
    valid: int | None = 0
    trained: int | None = 0
    rolled_back: int | None = 0
    skipped: int | None = 0
    routed: int | None = 0
    by_source: Mapping[str, SourceTokens] | None = field(default_factory=dict)
    lengths: Lengths | None = None
    rank_skew: float | None = None
    fullest_rank: int | None = None
    pace: Pace | None = None
    straggler_seconds: float | None = 0.0
    device_seconds: DeviceSeconds = field(default_factory=dict)
    gap_seconds: float | None = 0.0
    cells: Cells = field(default_factory=dict)
    fates_known: bool = True
    past_known: bool = True
    currency: str | None = None
    unpriced_seconds: float = 0.0
    ranks_reporting: int = 0
    segment: SegmentStart | None = None
    price: Price | None = None
    prices: tuple[Price, ...] = ()
    carried: bool = False
    mixed_currencies: bool = False
    rewinds: int = 0
    milestones: tuple[Milestone, ...] = ()
    before_segment: Account | None = None
    """The account when the running segment began: its own quantities are added to these."""

    @property
    def effective(self) -> int | None:
        """Valid tokens that made a step, of the surviving history."""
        if self.valid is None or self.rolled_back is None or self.skipped is None:
            return None
        return self.valid - self.skipped - self.rolled_back

    @property
    def complete(self) -> bool:
        """Whether every rank is in these numbers (as far as there are any)."""
        return self.segment is None or self.ranks_reporting in (0, self.segment.world_size)

    @property
    def cost(self) -> Decimal | None:
        """The sum of the cells, or None where a price or the device time of a rank is missing."""
        if self.currency is None or self.unpriced_seconds > 0 or self.mixed_currencies:
            return None
        if not self.complete or not self.past_known:
            return None
        return sum(self.cells.values(), Decimal(0))

    def cost_of(self, *, phase: str | None = None, fate: Fate | None = None) -> Decimal:
        """The money in the cells of a phase or a fate. Meaningful where `cost` is known."""
        return sum(
            (
                amount
                for (cell_phase, cell_fate), amount in self.cells.items()
                if phase in (None, cell_phase) and fate in (None, cell_fate)
            ),
            Decimal(0),
        )

    def seconds_in(self, *phases: str) -> float:
        """Device-seconds spent in these phases, all device types."""
        return sum(seconds for (_, phase), seconds in self.device_seconds.items() if phase in phases)

    @property
    def device_seconds_total(self) -> float:
        """All device-seconds held so far."""
        return sum(self.device_seconds.values())

    def milestone(self, segment: str, step: int) -> Milestone | None:
        """The newest one of this step in this segment, or in any if `segment` is ""; None if unknown."""
        for milestone in reversed(self.milestones):
            if milestone.step == step and segment in ("", milestone.segment):
                return milestone
        return None


def fold(account: Account, record: Record) -> Account:
    """The account after one more record. Total: what a damaged journal lacks becomes unknown."""
    if isinstance(record, SegmentStart):
        # What the devices of a new segment cost has to be said anew.
        before = replace(account, before_segment=None, past_known=account.past_known and account.complete)
        return replace(
            before,
            segment=record,
            price=None,
            ranks_reporting=0,
            lengths=None,
            rank_skew=None,
            pace=None,
            before_segment=before,
        )
    if isinstance(record, PriceSet):
        currency = record.price.currency
        mixed = account.mixed_currencies or account.currency not in (None, currency)
        prices = account.prices
        return replace(
            account,
            price=record.price,
            prices=prices if record.price in prices else (*prices, record.price),
            currency=account.currency or currency,
            mixed_currencies=mixed,
        )
    if isinstance(record, Quantities):
        return _add_quantities(account, record)
    if isinstance(record, Rollback):
        return _roll_back(account, record)
    if isinstance(record, CarriedOver):
        return _carry_over(account, record)
    return account


def account_of(records: Iterable[Record]) -> Account:
    """Fold a whole journal."""
    return reduce(fold, records, Account())


def _add_quantities(account: Account, record: Quantities) -> Account:
    if account.segment is None or account.segment.segment != record.segment:
        account = fold(account, _unknown_segment(record))
    before, segment = account.before_segment, account.segment
    assert before is not None
    assert segment is not None
    if account.rewinds != record.rewinds:
        # A record that changed the history is damaged: what it said is not known.
        before = replace(before, computed=None, valid=None, trained=None, routed=None, by_source=None)
        account = replace(account, before_segment=before, past_known=False, fates_known=False)
    if (account.t_mono, account.t_wall) == (before.t_mono, before.t_wall):
        account = _charge_gap(account, before, segment, record)
        before = account.before_segment
        assert before is not None
    held = merge(before.device_seconds, record.device_seconds)
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
    after = replace(
        account,
        step=record.step,
        position=record.position,
        high_water=max(account.high_water, record.position),
        t_wall=record.t_wall,
        t_mono=record.t_mono,
        elapsed=before.elapsed + record.elapsed,
        busy=before.busy + busy(record),
        computed=plus(before.computed, record.tokens.get("computed")),
        valid=plus(before.valid, record.tokens.get("valid")),
        trained=plus(before.trained, record.tokens.get("trained")),
        skipped=plus(before.skipped, record.skipped),
        routed=plus(before.routed, record.routed),
        by_source=add_sources(before.by_source, record.by_source),
        rank_skew=skew(record),
        fullest_rank=record.fullest.rank if record.fullest else None,
        lengths=record.lengths if record.kind in ("heartbeat", "final") else account.lengths,
        pace=record.pace or account.pace,
        straggler_seconds=stragglers(
            account.straggler_seconds, before.straggler_seconds, record, segment.world_size
        ),
        device_seconds=held,
        cells=cells,
        unpriced_seconds=unpriced,
        ranks_reporting=record.ranks_reporting,
    )
    return after if record.kind == "heartbeat" else _with_milestone(after, record.segment, record.step)


def _charge_gap(account: Account, before: Account, segment: SegmentStart, record: Quantities) -> Account:
    """Account for the time between the last record of the segment before and the start of this one.

    Within an allocation the machines were held, so it is billed, as restart and at the old price.
    """
    last = before.segment
    if last is None or not before.t_wall:
        return account
    same_clock = bool(segment.boot) and segment.boot == last.boot
    now, then = (record.t_mono, before.t_mono) if same_clock else (record.t_wall, before.t_wall)
    gap = round(now - record.elapsed - then, 6)
    if gap <= 0:
        return account
    seconds = gap * sum(last.devices_by_node)
    if last.allocation != segment.allocation and not segment.bill_gaps:
        longer = None if account.gap_seconds is None else account.gap_seconds + seconds
        return replace(account, gap_seconds=longer, before_segment=replace(before, gap_seconds=longer))
    held = merge(before.device_seconds, {last.device_type: {"restart": seconds}})
    cells, unpriced = dict(before.cells), before.unpriced_seconds
    if before.price is None:
        unpriced += seconds
    else:
        money = before.price.per_device_second(last.devices_by_node) * Decimal(str(seconds))
        cells[("restart", "surviving")] = cells.get(("restart", "surviving"), Decimal(0)) + money
    billed = replace(
        before, device_seconds=held, cells=cells, unpriced_seconds=unpriced, elapsed=before.elapsed + gap
    )
    return replace(
        account, device_seconds=held, cells=cells, unpriced_seconds=unpriced, before_segment=billed
    )


def _roll_back(account: Account, record: Rollback) -> Account:
    """Everything that is not part of the checkpoint's history becomes rolled back; nothing is unbilled."""
    milestone = account.milestone(record.to_segment, record.to_step)
    rewound = replace(account, rewinds=account.rewinds + 1, step=record.to_step)
    if milestone is None and record.to_step == 0:
        milestone = Milestone(record.to_segment, 0, 0, 0, {})
    effective = record.effective if milestone is None else milestone.effective
    made_a_step = minus(account.valid, account.skipped)
    rewound = replace(rewound, rolled_back=minus(made_a_step, effective))
    if milestone is None:
        return replace(rewound, fates_known=False)
    cells: dict[tuple[str, Fate], Decimal] = {}
    for phase in {phase for phase, _ in account.cells}:
        whole = account.cost_of(phase=phase)
        surviving = whole if phase in OVERHEAD else milestone.surviving.get(phase, Decimal(0))
        cells[(phase, "surviving")] = surviving
        if whole != surviving:
            cells[(phase, "rolled_back")] = whole - surviving
    return replace(rewound, position=milestone.position, cells=cells, fates_known=True)


def _carry_over(account: Account, record: CarriedOver) -> Account:
    """Totals of another journal, or of MLflow's history, in place of any of this one."""
    valid, effective = record.tokens.get("valid"), record.tokens.get("effective")
    is_known = record.source not in ("unknown", "unasked")
    device_seconds = merge({}, record.seconds)
    cells: Cells = {}
    if record.cells is not None:
        cells = {(phase, fate): amount for phase, fate, amount in record.cells}  # type: ignore[misc]
    before = replace(
        account,
        step=record.from_step,
        position=record.position,
        high_water=max(account.high_water, record.high_water),
        # What is carried goes beyond the last record here: the time since then is in it, in part.
        t_wall=0.0,
        t_mono=0.0,
        elapsed=record.elapsed,
        busy=record.busy,
        computed=record.tokens.get("computed"),
        valid=valid,
        trained=record.tokens.get("trained"),
        rolled_back=minus(valid, effective),
        skipped=0,
        routed=record.tokens.get("routed", 0 if record.source == "journal" else None),
        by_source=record.by_source,
        device_seconds=device_seconds,
        cells=cells,
        straggler_seconds=record.straggler_seconds,
        prices=(),
        carried=bool(record.cells),
        gap_seconds=record.gap_seconds if is_known else None,
        fates_known=record.source == "journal",
        past_known=is_known,
        currency=record.currency,
        unpriced_seconds=sum(device_seconds.values()) if record.cells is None else 0.0,
        rewinds=account.rewinds + 1,
        before_segment=None,
    )
    return _with_milestone(before, record.from_segment, record.from_step)


def _with_milestone(account: Account, segment: str, step: int) -> Account:
    surviving = {
        phase: amount
        for (phase, fate), amount in account.cells.items()
        if fate == "surviving" and phase not in OVERHEAD
    }
    milestone = Milestone(segment, step, account.position, account.effective, surviving)
    earlier = account.milestones
    if earlier and (earlier[-1].segment, earlier[-1].step) == (segment, step):
        earlier = earlier[:-1]
    return replace(account, milestones=(*earlier, milestone))


def _unknown_segment(record: Quantities) -> SegmentStart:
    """Stands in for the start of a segment that is damaged: its devices and their price are unknown."""
    devices = max(1, record.ranks_reporting)
    device_type = next(iter(record.device_seconds), "unknown")
    return SegmentStart(
        record.segment, record.segment, 0.0, devices, device_type, (devices,), "", "", "", ""
    )  # fmt: skip
