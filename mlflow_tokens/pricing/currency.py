"""The currency that a team reports in, and the dated rates at which others are converted to it."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal

from mlflow_tokens.pricing.price import Price


@dataclass(frozen=True, slots=True)
class Rate:
    """One unit of a currency is so many of the currency that is reported in, on that day."""

    rate: Decimal
    date: datetime.date


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates into `currency`, by the currency they are of. Without a currency nothing is converted."""

    currency: str | None = None
    rates: Mapping[str, Rate] = field(default_factory=dict)

    def convert(self, price: Price) -> Price:
        """The price in the reporting currency; its source says from which, at which rate of which day.

        Raises:
            ValueError: there is no rate, or the price at that rate is none that can be charged.
        """
        rate = self.rate_of(price.currency, str(price))
        if rate is None or self.currency is None:
            return price
        source = f"{price.source}; {self.said(str(price), rate)}"
        return replace(price, amount=price.amount * rate.rate, currency=self.currency, source=source)

    def said(self, what: str, rate: Rate) -> str:
        """What was converted, at which rate of which day: a part of the source of what comes of it."""
        return f"{what} at {rate.rate} {self.currency} of {rate.date.isoformat()}"

    def rate_of(self, currency: str, what: str) -> Rate | None:
        """The rate of a currency; None where there is nothing to convert.

        Raises:
            ValueError: there is none; the message says where to give it.
        """
        if self.currency is None or currency == self.currency:
            return None
        if currency not in self.rates:
            raise ValueError(
                f"{what} is not in {self.currency}: give the rate in [rates.{currency}] of the price file"
            )
        return self.rates[currency]
