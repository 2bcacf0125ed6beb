"""Fewer points of a long curve."""

from __future__ import annotations


def evenly(count: int, limit: int) -> list[int]:
    """At most `limit` of the indices 0 … count-1, evenly spread, the first and the last kept.

    Raises:
        ValueError: `limit` is less than 2, so that both ends do not fit.
    """
    if limit < 2:
        raise ValueError(f"limit={limit}: both ends are kept, so at least 2")
    if count <= limit:
        return list(range(count))
    return [round(place * (count - 1) / (limit - 1)) for place in range(limit)]
