"""Ranked runs and curves as the JSON API sends them: columns of numbers a browser can read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from mlflow_tokens.comparison.reader import Curve
from mlflow_tokens.comparison.table import RankedRun

#: Significant digits of a figure. Money keeps more: a bill of 1,234,567.89 must survive.
_DIGITS = 6
_MONEY_DIGITS = 12
_MONEY = frozenset({"cost_total", "cost_per_million", "cost_logged"})

#: Points of one curve at most; more than a plot has pixels.
CURVE_POINTS = 1000


def run_columns(lines: Sequence[RankedRun]) -> dict[str, list[Any]]:
    """One list for every field of `RankedRun`, in its order, each as long as there are runs."""
    return {
        field.name: [
            json_number(getattr(line, field.name), _MONEY_DIGITS if field.name in _MONEY else _DIGITS)
            for line in lines
        ]
        for field in dataclasses.fields(RankedRun)
    }


def json_number(value: Any, digits: int = _DIGITS) -> Any:
    """A float rounded to significant digits, None where it is not finite; anything else as it is."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def joined(over: Curve, against: Curve) -> tuple[list[float], list[float]]:
    """x (of `against`) and y (of `over`) at the steps that both have, in the order of the steps.

    A step logged more than once counts as it was logged last. Points without a finite x are left
    out; a y that is not finite stays, as a gap in the line.
    """
    x_at = dict(zip(against.steps, against.values, strict=True))
    y_at = dict(zip(over.steps, over.values, strict=True))
    steps = sorted(step for step in x_at.keys() & y_at.keys() if math.isfinite(x_at[step]))
    return [x_at[step] for step in steps], [y_at[step] for step in steps]


def per_million(tokens: Iterable[float], cost: Iterable[float]) -> tuple[list[float], list[float]]:
    """Tokens and 1e6 x cost / tokens, without the points that have no tokens yet."""
    points = [(x, 1e6 * y / x) for x, y in zip(tokens, cost, strict=True) if x > 0]
    return [x for x, _ in points], [y for _, y in points]
