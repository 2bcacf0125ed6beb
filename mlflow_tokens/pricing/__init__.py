"""Prices, and what quantities cost at them."""

from mlflow_tokens.pricing.price import EXAMPLES, Price, parse_price

__all__ = ["EXAMPLES", "Price", "parse_price"]
