"""Prices, and what quantities cost at them."""

from mlflow_tokens.pricing.choice import PriceChoice, choose_price
from mlflow_tokens.pricing.electricity import Electricity, cost_of_energy
from mlflow_tokens.pricing.price import EXAMPLES, Price, parse_price

__all__ = [
    "EXAMPLES",
    "Electricity",
    "Price",
    "PriceChoice",
    "choose_price",
    "cost_of_energy",
    "parse_price",
]
