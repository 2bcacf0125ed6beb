"""Rows into a ranking: which runs may be compared, and in what order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlflow_tokens.comparison.corrections import Correction, corrections_of
from mlflow_tokens.comparison.reader import RunRow
from mlflow_tokens.metrics import METRICS_SCHEMA

#: What a cost may be divided by. "effective" is the default of every view.
DENOMINATORS = ("effective", "valid", "trained", "computed")

TAG_SCHEMA = "mlflow_tokens.schema"
TAG_CURRENCY = "mlflow_tokens.currency"
TAG_PRICE = "mlflow_tokens.price"
TAG_TOKEN_DEFINITION = "mlflow_tokens.token_definition"
TAG_DEVICE_TYPE = "mlflow_tokens.device_type"
TAG_DEVICES = "mlflow_tokens.devices"


@dataclass(frozen=True, slots=True)
class RankedRun:
    """One line of the comparison. None means unknown; costs are in `currency`."""

    rank: int | None
    run_id: str
    run_name: str
    experiment_id: str
    experiment_name: str
    status: str
    user: str
    start_time_ms: int | None
    currency: str | None
    cost_per_million: float | None
    cost_total: float | None
    tokens_computed: int | None
    tokens_valid: int | None
    tokens_trained: int | None
    tokens_effective: int | None
    valid_ratio: float | None
    tokens_per_second: float | None
    tokens_per_second_per_device: float | None
    device_hours: float | None
    devices: str | None
    price: str | None
    token_definition: str | None
    cost_logged: float | None
    """What was logged where `cost_total` is that of an invoice; else None."""
    corrected_by: str | None
    corrected_at: str | None
    correction_note: str | None
    group: str
    """Runs of one group may be ranked together; the text says what sets the group apart."""


def rank(rows: Iterable[RunRow], by: str = "effective") -> list[RankedRun]:
    """Order runs by cost per million tokens, cheapest first, within groups that may be compared.

    Runs with another currency or token definition form a group of their own; runs whose cost or
    token count is unknown come last in their group, without a rank.

    Raises:
        ValueError: `by` is not one of `DENOMINATORS`.
    """
    if by not in DENOMINATORS:
        raise ValueError(f"by={by!r} is not one of {', '.join(DENOMINATORS)}")
    groups: dict[tuple[str, str], list[tuple[RunRow, _Money]]] = {}
    for row in rows:
        definition = row.tags.get(TAG_TOKEN_DEFINITION, "")
        schema = row.tags.get(TAG_SCHEMA, METRICS_SCHEMA)
        if schema != METRICS_SCHEMA:
            definition += f" (schema {schema})"
        money = _money(row)
        groups.setdefault((money.currency or "", definition), []).append((row, money))
    # Priced groups first, the larger before the smaller, then by name: a stable order.
    ordered = sorted(groups.items(), key=lambda item: (not item[0][0], -len(item[1]), item[0]))
    return [
        line
        for (currency, definition), members in ordered
        for line in _rank_group(currency, definition, members, by)
    ]


def _rank_group(
    currency: str, definition: str, members: Sequence[tuple[RunRow, _Money]], by: str
) -> list[RankedRun]:
    group = f"{currency or 'no price'}; {definition or 'no token definition'}"
    costed = [(_cost_per_million(row, money, by), row, money) for row, money in members]
    costed.sort(
        key=lambda each: (each[0] is None, each[0] or 0.0, each[1].start_time_ms or 0, each[1].run_id)
    )
    lines: list[RankedRun] = []
    place = 0
    for cost, row, money in costed:
        if cost is not None:
            place += 1
        lines.append(_line(row, money, group, cost, place if cost is not None else None))
    return lines


def _cost_per_million(row: RunRow, money: _Money, by: str) -> float | None:
    """1e6 x cost / tokens of the kind `by`, in the run's currency; None if either is unknown or no token."""
    cost, tokens = money.total, _number(row, f"tokens/{by}")
    return 1e6 * cost / tokens if cost is not None and tokens else None


def _line(row: RunRow, money: _Money, group: str, cost: float | None, place: int | None) -> RankedRun:
    computed, valid = _number(row, "tokens/computed"), _number(row, "tokens/valid")
    return RankedRun(
        rank=place,
        run_id=row.run_id,
        run_name=row.run_name,
        experiment_id=row.experiment_id,
        experiment_name=row.experiment_name,
        status=row.status,
        user=row.user,
        start_time_ms=row.start_time_ms,
        currency=money.currency,
        cost_per_million=cost,
        cost_total=money.total,
        tokens_computed=_integer(computed),
        tokens_valid=_integer(valid),
        tokens_trained=_integer(_number(row, "tokens/trained")),
        tokens_effective=_integer(_number(row, "tokens/effective")),
        valid_ratio=valid / computed if valid is not None and computed else None,
        tokens_per_second=_number(row, "throughput/tokens_per_second_average"),
        tokens_per_second_per_device=_number(row, "throughput/tokens_per_second_per_device_average"),
        device_hours=_number(row, "device/hours"),
        devices=_devices(row),
        price=row.tags.get(TAG_PRICE),
        token_definition=row.tags.get(TAG_TOKEN_DEFINITION),
        cost_logged=money.logged if money.correction else None,
        corrected_by=money.correction.by if money.correction else None,
        corrected_at=money.correction.time if money.correction else None,
        correction_note=money.correction.note if money.correction else None,
        group=group,
    )


@dataclass(frozen=True, slots=True)
class _Money:
    """total: by the newest invoice, else as it was logged."""

    currency: str | None
    total: float | None
    logged: float | None
    correction: Correction | None


def _money(row: RunRow) -> _Money:
    currency = row.tags.get(TAG_CURRENCY) or None
    logged = _number(row, "cost/total") if currency else None
    fitting = [made for made in corrections_of(row.tags) if currency in (None, made.currency)]
    if not fitting:
        return _Money(currency, logged, logged, None)
    newest = fitting[-1]
    return _Money(newest.currency, float(newest.total), logged, newest)


def _devices(row: RunRow) -> str | None:
    kind, count = row.tags.get(TAG_DEVICE_TYPE), row.tags.get(TAG_DEVICES)
    return f"{count} x {kind}" if kind and count else None


def _number(row: RunRow, metric: str) -> float | None:
    value = row.metrics.get(metric)
    return value if value is not None and math.isfinite(value) else None


def _integer(value: float | None) -> int | None:
    return None if value is None else int(value)
