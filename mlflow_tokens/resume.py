"""Where a resumed run begins: found in its journal, in that of its parent run, or in MLflow's history."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Protocol

from mlflow_tokens.account import Account, fold
from mlflow_tokens.checkpoint import Checkpoint
from mlflow_tokens.journal import read_journal
from mlflow_tokens.notices import say_once
from mlflow_tokens.records import CarriedOver, Quantities, Record, Rollback, RunBound

KINDS = ("computed", "valid", "trained", "effective")


class History(Protocol):
    """What MLflow has stored of one run: our metrics and our tags. All may raise."""

    def latest(self, but: AbstractSet[int] = frozenset()) -> Mapping[str, tuple[float, int, int]]:
        """The latest value of each metric, with its step and its time in ms; times in `but` do not count."""

    def at(self, timestamp_ms: int) -> Mapping[str, float]:
        """The metrics of exactly this time."""

    def tags(self) -> Mapping[str, str]:
        """The tags of the run that begin with `mlflow_tokens.`."""


@dataclass(frozen=True, slots=True)
class OpenPast:
    """What stands in the journal for a run's past as long as MLflow has not said what it was.

    rollback: to `checkpoint`, where training resumes from one.
    """

    unknown: CarriedOver
    rollback: Rollback | None = None
    checkpoint: Checkpoint | None = None


#: The history of a run.
HistoryOf = Callable[[str], History]


def find_journal(directory: Path, run: str | None, segment: str) -> Path | None:
    """The journal of a run, or the one that a segment is in; None if there is none."""
    for name in (run, segment):
        if name and (path := directory / f"{name}.jsonl").is_file():
            return path
    if not segment:
        return None
    # It bears the name of a run that was not known when the checkpoint was saved.
    mark = f'"segment":"{segment}"'.encode()
    return next((path for path in sorted(directory.glob("*.jsonl")) if mark in path.read_bytes()), None)


def run_of(path: Path) -> str | None:
    """The run that a journal is of, if it was known when the journal was written.

    Raises:
        OSError: the file cannot be read.
        ValueError: a record is of another schema.
    """
    runs = [record.run for record in read_journal(path) if isinstance(record, RunBound) and record.run]
    return runs[-1] if runs else None


def past_records(
    account: Account,
    checkpoint: Checkpoint | None,
    *,
    run: str | None,
    segment: str,
    now: float,
    directory: Path,
    history_of: HistoryOf | None,
    began_here: AbstractSet[str] = frozenset(),
) -> list[Record]:
    """What has to be recorded before this segment, so that the account is where the training is.

    Args:
        account: the run's journal so far. checkpoint: what training resumes from, if that is known.
        run, segment: of this process. now: time of day in s. directory: where the journals are.
        history_of: asks MLflow about a run; None if there can be nothing.
        began_here: segments that began in this journal, even if they died before their first quantities.
    """
    if account.milestones and not _is_stale(account, checkpoint, run, history_of, began_here):
        return [] if checkpoint is None else _back_to(account, checkpoint, segment, now, directory)
    if checkpoint is not None and (run is None or checkpoint.run not in (None, run)):
        return [_parent(checkpoint, directory, history_of)] if checkpoint.step else []
    if run is None:
        return []
    past = OpenPast(unknown_past(run, account.step, account.high_water))
    if checkpoint is not None:
        past = OpenPast(
            unknown_past(run, checkpoint.step, checkpoint.position, checkpoint.segment),
            Rollback(segment, now, checkpoint.segment, checkpoint.step),
            checkpoint,
        )
    elif history_of is None:
        return []
    unknown = past.unknown
    try:
        if history_of is not None:
            return _known_past(past, run, history_of(run))
    except Exception as error:
        say_once("past", "MLflow does not say what it has of the run so far (%r): totals wait for it.", error)
        unknown = replace(unknown, source="unasked")
    return [unknown] if past.rollback is None else [unknown, past.rollback]


def left_open(records: Sequence[Record], checkpoint: Checkpoint | None = None) -> OpenPast | None:
    """What these records leave open, with the rollback to `checkpoint` among them; None if nothing."""
    first = records[0] if records else None
    if not isinstance(first, CarriedOver) or first.source != "unasked":
        return None
    rollback = next((record for record in records if isinstance(record, Rollback)), None)
    return OpenPast(replace(first, source="unknown"), rollback, checkpoint)


def late_records(past: OpenPast, run: str, history: History, recorded: AbstractSet[int]) -> list[Record]:
    """What MLflow has of a run's past, to stand in the place of `past_records` that it left open. May raise.

    recorded: the times in ms of what the journal has, which somebody may have brought to MLflow already:
    it is not the past.
    """
    answers = _known_past(past, run, history, recorded) or [_nothing(run)]
    return [replace(answer, late=True) for answer in answers if isinstance(answer, CarriedOver | Rollback)]


def _known_past(
    past: OpenPast, run: str, history: History, recorded: AbstractSet[int] = frozenset()
) -> list[Record]:
    """What MLflow has of a run that began elsewhere; it may have nothing of steps that there were."""
    latest = history.latest(recorded)
    head = _head(run, history, latest)
    if head is None and not past.unknown.from_step:
        return []
    if head is None or not _reaches(past, latest):
        say_once(
            "carried",
            "Not all is known of the %s steps before this: token totals and cost stay unknown.",
            past.unknown.from_step,
        )
        head = None
    carried = head or past.unknown
    if past.rollback is None or past.checkpoint is None:
        return [carried]
    return [carried, replace(past.rollback, effective=_effective_at(history, past.checkpoint))]


def _is_stale(
    account: Account,
    checkpoint: Checkpoint | None,
    run: str | None,
    history_of: HistoryOf | None,
    began_here: AbstractSet[str],
) -> bool:
    """Whether the run went on elsewhere, with another journal, since this one was written."""
    if run is None or history_of is None:
        return False
    here = {"", *began_here, *(milestone.segment for milestone in account.milestones)}
    if checkpoint is not None and checkpoint.run == run and checkpoint.segment not in here:
        return True
    try:
        computed, _, _ = history_of(run).latest().get("tokens/computed", (0.0, 0, 0))
    except Exception as error:
        say_once("history", "What MLflow has of the run so far cannot be read: %s", error)
        return False
    return account.computed is not None and computed > account.computed


def _back_to(
    account: Account, checkpoint: Checkpoint, segment: str, now: float, directory: Path
) -> list[Record]:
    newest = account.milestones[-1]
    if checkpoint.step == account.step and checkpoint.segment in ("", newest.segment):
        return []
    effective = None
    if account.milestone(checkpoint.segment, checkpoint.step) is None and checkpoint.step:
        parent = find_journal(directory, checkpoint.run, checkpoint.segment)
        there = _account_at(parent, checkpoint) if parent else None
        effective = there.effective if there else None
        if there is None:
            say_once(
                "rollback",
                "The journal does not hold step %s of the checkpoint; effective tokens are unknown.",
                checkpoint.step,
            )
    return [Rollback(segment, now, checkpoint.segment, checkpoint.step, effective)]


def _account_at(path: Path, checkpoint: Checkpoint) -> Account | None:
    """The account of a journal as it stood when the checkpoint was saved."""
    account, found = Account(), None
    for record in read_journal(path):
        account = fold(account, record)
        if (
            isinstance(record, Quantities)
            and record.step == checkpoint.step
            and checkpoint.segment in ("", record.segment)
            and record.kind != "heartbeat"
        ):
            found = account
            if round(record.t_wall * 1000) == checkpoint.timestamp_ms:
                break
    return found


def _parent(checkpoint: Checkpoint, directory: Path, history_of: HistoryOf | None) -> CarriedOver:
    path = find_journal(directory, checkpoint.run, checkpoint.segment)
    there = _account_at(path, checkpoint) if path else None
    if there is not None:
        return _carry_account(there, checkpoint)
    if history_of is None or checkpoint.run is None:
        return _unknown(checkpoint)
    try:
        history = history_of(checkpoint.run)
        values = history.at(checkpoint.timestamp_ms)
        return _carry_values(
            values,
            history.tags(),
            run=checkpoint.run,
            step=checkpoint.step,
            position=checkpoint.position,
            high_water=0,
        )
    except KeyError:
        return _unknown(checkpoint)  # the run has no such point, or not all of it
    except Exception as error:
        say_once("history", "The run that training resumes from cannot be read: %s", error)
        return _unknown(checkpoint)


def _carry_account(account: Account, checkpoint: Checkpoint) -> CarriedOver:
    totals = {kind: getattr(account, kind) for kind in (*KINDS, "routed")}
    seconds: dict[str, dict[str, float]] = {}
    for (device_type, phase), held in account.device_seconds.items():
        seconds.setdefault(device_type, {})[phase] = held
    priced = account.cost is not None and account.fates_known
    return CarriedOver(
        from_run=checkpoint.run or "",
        from_segment=checkpoint.segment,
        from_step=checkpoint.step,
        source="journal",
        position=account.position,
        high_water=0,
        elapsed=account.elapsed,
        busy=account.busy,
        tokens={kind: total for kind, total in totals.items() if total is not None},
        seconds=seconds,
        currency=account.currency if priced else None,
        cells=tuple((phase, fate, amount) for (phase, fate), amount in account.cells.items())
        if priced
        else None,
        gap_seconds=account.gap_seconds,
        by_source=account.by_source,
        straggler_seconds=account.straggler_seconds,
    )


def _reaches(past: OpenPast, latest: Mapping[str, tuple[float, int, int]]) -> bool:
    """Whether MLflow has totals that contain those of the checkpoint.

    A process that was killed may have trained on, to the checkpoint, after what reached MLflow.
    """
    _, position, time_ms = latest["tokens/computed"]
    if past.checkpoint is not None:
        return time_ms >= past.checkpoint.timestamp_ms
    return position >= past.unknown.position


def _head(run: str, history: History, latest: Mapping[str, tuple[float, int, int]]) -> CarriedOver | None:
    """The totals that MLflow has of a run; None if it has none. May raise.

    Where it has some that say too little, or were unknown themselves, those of the run are unknown.
    """
    if "tokens/computed" not in latest:
        return None
    position = max(point for _, point, _ in latest.values())
    values = {name: value for name, (value, _, _) in latest.items()}
    tags = history.tags()
    try:
        return _carry_values(values, tags, run=run, step=position, position=position, high_water=position)
    except (KeyError, ZeroDivisionError) as error:
        say_once("history", "What MLflow has of the run so far says too little: %r", error)
        return unknown_past(run, position, position)


def _carry_values(
    values: Mapping[str, float],
    tags: Mapping[str, str],
    *,
    run: str,
    step: int,
    position: int,
    high_water: int,
) -> CarriedOver:
    """Quantities from the metrics that were derived from them; raises KeyError if one is missing."""
    known = {name: value for name, value in values.items() if math.isfinite(value)}
    tokens = {kind: int(known[f"tokens/{kind}"]) for kind in KINDS if f"tokens/{kind}" in known}
    held, computed = known["device/hours"] * 3600, known["tokens/computed"]
    device_busy = computed / known["throughput/tokens_per_second_per_device_average"]
    currency, cost = tags.get("mlflow_tokens.currency"), known.get("cost/total")
    return CarriedOver(
        from_run=run,
        from_segment="",
        from_step=step,
        source="history",
        position=position,
        high_water=high_water,
        elapsed=computed / known["throughput/tokens_per_second_wall"],
        busy=computed / known["throughput/tokens_per_second_average"],
        tokens=tokens,
        seconds={
            tags.get("mlflow_tokens.device_type", "unknown"): {
                "train": device_busy,
                "other": max(0.0, held - device_busy),
            }
        },
        currency=currency if cost is not None else None,
        cells=(("other", "surviving", Decimal(repr(cost))),) if currency and cost is not None else None,
        gap_seconds=known.get("device/gap_hours", 0.0) * 3600,
    )


def _effective_at(history: History, checkpoint: Checkpoint) -> int | None:
    effective = history.at(checkpoint.timestamp_ms).get("tokens/effective", math.nan)
    return int(effective) if math.isfinite(effective) else None


def _unknown(checkpoint: Checkpoint) -> CarriedOver:
    say_once(
        "carried",
        "Nothing is known of the %s steps before this checkpoint: token totals and cost stay unknown.",
        checkpoint.step,
    )
    return unknown_past(checkpoint.run or "", checkpoint.step, checkpoint.position, checkpoint.segment)


def unknown_past(run: str, step: int, position: int, segment: str = "") -> CarriedOver:
    """Says that there were steps before of which nothing is known: totals are unknown, and not too small."""
    return CarriedOver(
        from_run=run,
        from_segment=segment,
        from_step=step,
        source="unknown",
        position=position,
        high_water=position,
        elapsed=0.0,
        busy=0.0,
        tokens={},
        seconds={},
    )


def _nothing(run: str) -> CarriedOver:
    """Says that there were no steps before: the totals are known, and 0."""
    return replace(
        unknown_past(run, 0, 0),
        source="journal",
        tokens=dict.fromkeys((*KINDS, "routed"), 0),
        cells=(),
        by_source={},
        straggler_seconds=0.0,
    )
