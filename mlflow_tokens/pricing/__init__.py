"""Prices, and what quantities cost at them."""

from mlflow_tokens.pricing.choice import PriceChoice, choose_price
from mlflow_tokens.pricing.price import EXAMPLES, Price, parse_price

__all__ = ["EXAMPLES", "Price", "PriceChoice", "choose_price", "parse_price"]
