"""Which data source the tokens of a micro-batch come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlflow_tokens.counting import BatchCounts, Scalar

#: Sources that are told apart; the tokens of any further ones are counted as of "other".
MOST_SOURCES = 100
OTHER = "other"

#: Computed and valid tokens; None where unknown.
SourceCounts = tuple[Scalar | None, Scalar | None]


def by_source(counts: BatchCounts, names: str | Sequence[str]) -> Mapping[str, SourceCounts]:
    """The tokens of a micro-batch by source: all of one, or one source a row.

    Raises:
        ValueError: the names are neither a text nor one text a row.
    """
    if isinstance(names, str):
        return {names: (counts.computed, counts.valid)}
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"a source is a name, or a list with one name a row, and not {names!r:.80}")
    if counts.rows is None or counts.width is None or len(names) != counts.rows:
        raise ValueError(f"{len(names)} sources are not one a row of the batch")
    found: dict[str, SourceCounts] = {}
    for name in dict.fromkeys(names):
        rows = [row for row, its_name in enumerate(names) if its_name == name]
        found[name] = (len(rows) * counts.width, _valid_in(counts, rows))
    return found


def add_sources(
    total: Mapping[str, SourceCounts], more: Mapping[str, SourceCounts]
) -> Mapping[str, SourceCounts]:
    """The sum; a part that is unknown makes its source unknown."""
    summed = dict(total)
    for name, (computed, valid) in more.items():
        key = name if name in summed or len(summed) < MOST_SOURCES else OTHER
        before = summed.get(key, (0, 0))
        summed[key] = (_plus(before[0], computed), _plus(before[1], valid))
    return summed


def _valid_in(counts: BatchCounts, rows: list[int]) -> Scalar | None:
    if counts.lengths is None:
        # Without padding every row is full.
        full = counts.rows is not None and counts.valid == counts.computed
        return len(rows) * (counts.width or 0) if isinstance(counts.valid, int) and full else None
    return counts.lengths[rows].sum()


def _plus(total: Any, part: Any) -> Any:
    return None if total is None or part is None else total + part
