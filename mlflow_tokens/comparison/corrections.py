"""What a run cost by its invoice: corrections that are added to a run and never changed."""

from __future__ import annotations

import datetime
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from mlflow_tokens.comparison.reader import ReadError
from mlflow_tokens.pricing.price import is_currency

#: Each correction is a tag of its own, named by its time, so that two people cannot overwrite each other.
TAG_PREFIX = "mlflow_tokens.correction."
SCHEMA = 1

#: Characters of who and why; MLflow takes 8,000 for a tag.
LONGEST_BY, LONGEST_NOTE = 200, 2000

_TOTAL = re.compile(
    r"\s*(?P<amount>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)\s*(?P<currency>[A-Za-z]{3})\s*"
)


@dataclass(frozen=True, slots=True)
class Correction:
    """The total of a run by an invoice. time: of day in UTC, ISO 8601, when it was made."""

    total: Decimal
    currency: str
    by: str
    note: str
    time: str


def correction(total: str, by: str, note: str) -> Correction:
    """A correction that is made now.

    Raises:
        ValueError: the total is no amount of money, or nobody makes it; the message says what to give.
    """
    match = _TOTAL.fullmatch(total)
    amount = Decimal(match["amount"].replace(",", "")) if match else Decimal(0)
    if match is None or amount <= 0:
        raise ValueError(
            f'--total={total!r} is not an amount with its currency, above 0, as in "4812.40 USD"'
        )
    if not by.strip():
        raise ValueError("--by is empty: say who corrects, as in --by finance@example.com")
    if len(by) > LONGEST_BY or len(note) > LONGEST_NOTE:
        raise ValueError(f"--by has {LONGEST_BY} characters at most, --note {LONGEST_NOTE}")
    return Correction(amount, match["currency"].upper(), by.strip(), note.strip(), _text(_now()))


def tag_of(made: Correction) -> tuple[str, str]:
    """The tag that keeps a correction: its key, which sorts by time, and its value."""
    stamp = re.sub(r"\D", "", made.time.partition("+")[0])
    values = {"schema": SCHEMA, **asdict(made), "total": str(made.total)}
    return f"{TAG_PREFIX}{stamp}.{uuid.uuid4().hex[:8]}", json.dumps(values, ensure_ascii=False)


def corrections_of(tags: Mapping[str, str]) -> list[Correction]:
    """The corrections of a run, in the order they were made; tags that are none are left out."""
    found = [_read(tags[key]) for key in sorted(filter(_is_correction, tags))]
    return [made for made in found if made is not None]


def _is_correction(key: str) -> bool:
    return key.startswith(TAG_PREFIX)


def _read(text: str) -> Correction | None:
    try:
        values: Any = json.loads(text)
        text = values["total"]
        total = Decimal(text)
        if values["schema"] != SCHEMA or not isinstance(text, str) or not total.is_finite() or total <= 0:
            return None
        if not is_currency(values["currency"]):
            return None
        datetime.datetime.fromisoformat(values["time"])
        return Correction(total, values["currency"], *(str(values[name]) for name in ("by", "note", "time")))
    except (ValueError, KeyError, TypeError, InvalidOperation):
        return None


def correct_run(tracking_uri: str | None, run_id: str, made: Correction) -> list[Correction]:
    """Add a correction to a run in MLflow, and give all that it has now.

    Raises:
        ReadError: the run cannot be read or written, has no tokens of ours, or has another currency.
    """
    import mlflow
    from mlflow.exceptions import MlflowException

    client = mlflow.MlflowClient(tracking_uri=tracking_uri)
    try:
        tags = client.get_run(run_id).data.tags
        if "mlflow_tokens.schema" not in tags:
            raise ReadError(f"run {run_id} was not logged by mlflow_tokens: there is no cost to correct")
        currency = tags.get("mlflow_tokens.currency")
        if currency not in (None, made.currency):
            raise ReadError(
                f"run {run_id} was billed in {currency}: give the invoice in it, at the rate that was booked"
            )
        key, value = tag_of(_after(made, corrections_of(tags)))
        client.set_tag(run_id, key, value)
        return corrections_of({**tags, key: value})
    except (MlflowException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ReadError(f"run {run_id} could not be corrected: {reason}") from error


def _after(made: Correction, earlier: list[Correction]) -> Correction:
    """The correction with a time after all others, whatever clock made those."""
    latest = max((each.time for each in earlier), default="")
    if made.time > latest:
        return made
    later = datetime.datetime.fromisoformat(latest) + datetime.timedelta(microseconds=1)
    return replace(made, time=_text(later))


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def _text(time: datetime.datetime) -> str:
    return time.isoformat("T", "microseconds")
