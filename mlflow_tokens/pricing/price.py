"""What a device or an instance costs an hour or a month, as a person states it and as it is charged."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, get_args

Unit = Literal["device-hour", "instance-hour", "device-month", "instance-month"]
Kind = Literal["on-demand", "spot", "reserved", "owned"]

SECONDS_PER_HOUR = 3600
#: A month is a twelfth of 365 days.
HOURS_PER_MONTH = 730

#: What a device-hour may cost. Beyond that something else was meant.
LEAST, MOST = Decimal("0.0001"), Decimal(10_000)
#: Currencies whose unit is small: 16,000 KRW are a real device-hour of about 12 USD. They may cost more.
SMALL_UNITS = frozenset({"COP", "IDR", "IRR", "KRW", "LAK", "LBP", "PYG", "UZS", "VND"})
_MOST_SMALL = 1000 * MOST

EXAMPLES = (
    "2.0 USD/device-hour",
    "15 CNY/device-hour",
    "98.32 USD/instance-hour x8",
    "30000 CNY/instance-month x8 reserved",
)

_TEXT = re.compile(
    r"""\s*(?P<amount>\d+(?:\.\d+)?|\.\d+)
        \s*(?P<currency>[A-Za-z]{3})
        \s*/\s*(?P<unit>(?:device|instance)-(?:hour|month))
        (?:\s+x\s*(?P<devices>\d+))?
        (?:\s+(?P<kind>on-demand|spot|reserved|owned))?\s*""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Price:
    """A price with all that a finance department asks of it.

    `devices_per_instance` is given for instances alone. `kind` is None when nobody said. `date` is the
    day for which the price was stated.
    """

    amount: Decimal
    currency: str
    unit: Unit
    devices_per_instance: int | None = None
    kind: Kind | None = None
    source: str = "stated by the user"
    date: datetime.date | None = None

    def __post_init__(self) -> None:
        """Raises ValueError where this is not a price that can be charged."""
        if not isinstance(self.amount, Decimal) or not self.amount.is_finite() or self.amount <= 0:
            raise ValueError(f"amount={self.amount!r} must be a Decimal above 0, as in Decimal('2.0')")
        if not is_currency(self.currency):
            raise ValueError(f"currency={self.currency!r} must be three capital letters, as in 'USD'")
        if self.unit not in get_args(Unit):
            raise ValueError(f"unit={self.unit!r} must be one of {', '.join(get_args(Unit))}")
        if self.kind is not None and self.kind not in get_args(Kind):
            raise ValueError(f"kind={self.kind!r} must be one of {', '.join(get_args(Kind))}, or None")
        devices = self.devices_per_instance
        if not self._is_of_instances and devices is not None:
            raise ValueError("devices_per_instance belongs to an instance-hour; a device-hour is one device")
        if self._is_of_instances and (not isinstance(devices, int) or devices < 1):
            raise ValueError(
                f"devices_per_instance={devices!r}: an instance-hour needs the number of its devices"
            )
        # 10,000 a device-hour is allowed, and must not be lost to the digits of a division.
        hourly = round(self.per_device_second([devices or 1]) * SECONDS_PER_HOUR, 12)
        most = _MOST_SMALL if self.currency in SMALL_UNITS else MOST
        if not LEAST <= hourly <= most:
            raise ValueError(
                f"{self} is {float(hourly):.6g} {self.currency} a device-hour, which no device costs: "
                f"{self._likely_mistake(hourly > most)}"
            )

    def __str__(self) -> str:
        devices = f" x{self.devices_per_instance}" if self.devices_per_instance else ""
        kind = f" {self.kind}" if self.kind else ""
        return f"{self.amount} {self.currency}/{self.unit}{devices}{kind}"

    def _likely_mistake(self, too_much: bool) -> str:
        """What a person who states such an amount has most likely meant."""
        monthly = self.unit.endswith("-month")
        if too_much:
            period = "a year" if monthly else "a month"
            what = "has the instance more devices" if self._is_of_instances else "is it of a whole instance"
        else:
            period = "an hour" if monthly else "a second"
            what = "has the instance fewer devices" if self._is_of_instances else "is the currency another"
        return f"is that the amount {period}, or {what}?"

    @property
    def _is_of_instances(self) -> bool:
        return self.unit.startswith("instance-")

    def per_device_second(self, devices_by_node: Iterable[int]) -> Decimal:
        """What one held device costs a second, in `currency`.

        Instances are billed whole: a node with 6 of 8 devices in use pays for 8, so each of the 6
        carries 8/6 of its share.

        Args:
            devices_by_node: devices held on each node; every node rents its own instances.
        """
        seconds = SECONDS_PER_HOUR * (HOURS_PER_MONTH if self.unit.endswith("-month") else 1)
        if not self._is_of_instances:
            return self.amount / seconds
        assert self.devices_per_instance is not None
        held = [devices for devices in devices_by_node if devices > 0]
        instances = sum(-(-devices // self.devices_per_instance) for devices in held)
        return self.amount * instances / sum(held) / seconds


def is_currency(text: str) -> bool:
    """Whether this is a currency's code: three capital letters."""
    return re.fullmatch("[A-Z]{3}", text) is not None


def parse_price(text: str | Price | None, today: datetime.date | None = None) -> Price | None:
    """Read a price from text such as those in `EXAMPLES`; None stays None (no price, no cost).

    Raises:
        ValueError: the text is not a price; the message shows prices that are.
    """
    if text is None or isinstance(text, Price):
        return text
    match = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(_advice(text, "it is not of the form AMOUNT CURRENCY/UNIT"))
    amount = Decimal(match["amount"])
    unit: Unit = match["unit"]  # type: ignore[assignment]
    kind: Kind | None = match["kind"]  # type: ignore[assignment]
    devices = int(match["devices"]) if match["devices"] else None
    if amount == 0:
        raise ValueError(_advice(text, "an amount of 0 buys nothing; leave `price` out if it is unknown"))
    if unit.startswith("instance-") and not devices:
        raise ValueError(
            _advice(text, "an instance-hour needs the number of devices of the instance, as in x8")
        )
    if unit.startswith("device-") and devices is not None:
        raise ValueError(_advice(text, "x8 belongs to an instance-hour; a device-hour is one device"))
    try:
        return Price(
            amount=amount,
            currency=match["currency"].upper(),
            unit=unit,
            devices_per_instance=devices,
            kind=kind,
            date=today or datetime.date.today(),
        )
    except ValueError as error:
        raise ValueError(_advice(text, str(error))) from None


def _advice(text: object, reason: str) -> str:
    return f"price={text!r} cannot be used: {reason}. Valid prices: " + ", ".join(map(repr, EXAMPLES))
