"""The cost statement of a run: what its money bought, in lines that add up to the total."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from mlflow_tokens.account import Account
from mlflow_tokens.clock import PHASES
from mlflow_tokens.pricing import Price

#: What a line of the statement is about: training that is left, its padding, a phase, or what was lost.
Item = Literal[
    "effective", "padding", "train", "data_wait", "eval", "checkpoint", "startup", "restart", "other", "lost"
]
#: Why there is no cost, and what no number here contains.
Unknown = Literal["no_price", "unpriced", "mixed_currencies", "ranks_missing", "past_unknown"]
Unseen = Literal["before_start", "host_power", "gaps", "past_prices", "fates", "padding"]

#: Share of padding from which on packing is worth a word.
MUCH_PADDING = 0.3

_MILLION = Decimal(1_000_000)


@dataclass(frozen=True, slots=True)
class Line:
    """Money that went to one item. share: of the total, 0 to 1."""

    item: Item
    amount: Decimal
    share: float


@dataclass(frozen=True, slots=True)
class Statement:
    """What the money of a run bought. None and empty: unknown, or there was none.

    total: of all lines, exactly, in `currency`. straggler: of the money for training, at least, what went to
    devices that waited for another rank's data. unknown: why there is no total. unseen: what is not in any
    number here.
    """

    status: str
    currency: str | None
    total: Decimal | None
    lines: tuple[Line, ...]
    prices: tuple[Price, ...]
    straggler: Decimal | None
    computed: int | None
    valid: int | None
    effective: int | None
    devices: int
    device_type: str
    device_hours: float | None
    gap_hours: float | None
    unknown: tuple[Unknown, ...]
    unseen: tuple[Unseen, ...]

    @property
    def per_million(self) -> Decimal | None:
        """Cost per million effective tokens."""
        return _per_million(self.total, self.effective)

    @property
    def per_million_computed(self) -> Decimal | None:
        """Cost per million computed tokens."""
        return _per_million(self.total, self.computed)

    @property
    def padding_share(self) -> float | None:
        """Padding of all computed tokens, 0 to 1."""
        return None if self.valid is None or not self.computed else 1 - self.valid / self.computed

    @property
    def saving(self) -> Decimal | None:
        """What packing would save at most, where padding is much of the computed tokens."""
        if self.padding_share is None or self.padding_share <= MUCH_PADDING:
            return None
        return next((line.amount for line in self.lines if line.item == "padding"), None)


def statement_of(account: Account, status: str) -> Statement:
    """The statement of a run as its account stands."""
    total = account.cost
    segment = account.segment
    return Statement(
        status=status,
        currency=account.currency,
        total=total,
        lines=tuple(_lines(account, total)) if total else (),
        prices=account.prices,
        straggler=straggler_cost(account),
        computed=account.computed,
        valid=account.valid,
        effective=account.effective,
        devices=sum(segment.devices_by_node) if segment else 0,
        device_type=segment.device_type if segment else "unknown",
        device_hours=account.device_seconds_total / 3600 if account.complete and account.past_known else None,
        gap_hours=account.gap_seconds / 3600 if account.gap_seconds else None,
        unknown=() if total is not None else tuple(_reasons(account)),
        unseen=tuple(_unseen(account, total)),
    )


def padding_cost(account: Account) -> Decimal | None:
    """Of training that is left, the share of padding; None where valid tokens or fates are unknown."""
    if account.cost is None or not account.fates_known or account.valid is None or not account.computed:
        return None
    train = account.cost_of(phase="train", fate="surviving")
    return train * (account.computed - account.valid) / account.computed


def straggler_cost(account: Account) -> Decimal | None:
    """Of training, what devices cost, at least, that waited for another rank's data; None if nothing."""
    train = account.seconds_in("train")
    if account.cost is None or train <= 0 or not account.straggler_seconds:
        return None
    share = min(1.0, account.straggler_seconds / train)
    return account.cost_of(phase="train") * Decimal(str(share))


def _lines(account: Account, total: Decimal) -> Iterator[Line]:
    def line(item: Item, amount: Decimal) -> Line:
        return Line(item, amount, float(amount / total))

    fate: Literal["surviving"] | None = "surviving" if account.fates_known else None
    train, padding = account.cost_of(phase="train", fate=fate), padding_cost(account)
    if padding is None:
        yield line("train", train)
    else:
        yield line("effective", train - padding)
        yield line("padding", padding)
    for phase in PHASES:
        if phase != "train" and (amount := account.cost_of(phase=phase, fate=fate)):
            yield line(phase, amount)
    if fate is not None and (lost := account.cost_of(fate="rolled_back")):
        yield line("lost", lost)


def _reasons(account: Account) -> Iterator[Unknown]:
    if account.currency is None:
        yield "no_price"
    elif account.unpriced_seconds > 0:
        yield "unpriced"
    if account.mixed_currencies:
        yield "mixed_currencies"
    if not account.complete:
        yield "ranks_missing"
    if not account.past_known:
        yield "past_unknown"


def _unseen(account: Account, total: Decimal | None) -> Iterator[Unseen]:
    yield "before_start"
    if not any(price.kind in (None, "on-demand", "spot", "reserved") for price in account.prices):
        yield "host_power"
    if account.gap_seconds:
        yield "gaps"
    if total is not None and account.carried:
        yield "past_prices"
    if total is not None and not account.fates_known:
        yield "fates"
    elif total is not None and account.valid is None:
        yield "padding"


def _per_million(total: Decimal | None, tokens: int | None) -> Decimal | None:
    return total * _MILLION / tokens if total is not None and tokens else None
