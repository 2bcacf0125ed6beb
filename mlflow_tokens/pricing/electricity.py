"""What the electricity of owned hardware costs, from the energy of its devices."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from decimal import Decimal

JOULES_PER_KWH = 3_600_000


@dataclass(frozen=True, slots=True)
class Electricity:
    """A tariff, and what is drawn beside the devices.

    tariff: money a kWh, in `currency`. pue: all energy of the site over that of its machines, 1 or more.
    node_overhead_watts: what a node draws beside its devices (processors, fans, network), in W.
    """

    tariff: Decimal
    currency: str
    pue: Decimal
    node_overhead_watts: Decimal
    source: str = "stated by the user"
    date: datetime.date | None = None

    def __post_init__(self) -> None:
        """Raises ValueError where this cannot be charged."""
        if not self.tariff.is_finite() or self.tariff <= 0:
            raise ValueError(f"tariff={self.tariff} must be money a kWh, above 0")
        if not self.pue.is_finite() or self.pue < 1:
            raise ValueError(f"pue={self.pue} is below 1: a site draws no less than its machines")
        if not self.node_overhead_watts.is_finite() or self.node_overhead_watts < 0:
            raise ValueError(
                f"node_overhead_watts={self.node_overhead_watts} must be watts a node, 0 or more"
            )


def cost_of_energy(
    electricity: Electricity, joules: Decimal | float | None, node_seconds: Decimal | float | None
) -> Decimal | None:
    """Money for the energy of the devices and of their nodes, in the currency of the tariff.

    (joules + node_overhead_watts x node_seconds) x pue / 3,600,000 x tariff

    Args:
        joules: energy of the devices in J; None if it was not measured: then the cost is unknown, too.
        node_seconds: seconds that nodes were held, summed over nodes; None if unknown.

    Raises:
        ValueError: less than no energy or time, or no number.
    """
    if joules is None or node_seconds is None:
        return None
    energy, held = Decimal(str(joules)), Decimal(str(node_seconds))
    if not energy.is_finite() or not held.is_finite() or energy < 0 or held < 0:
        raise ValueError(f"joules={joules}, node_seconds={node_seconds}: must be numbers, 0 or more")
    drawn = (energy + electricity.node_overhead_watts * held) * electricity.pue
    return drawn * electricity.tariff / JOULES_PER_KWH
