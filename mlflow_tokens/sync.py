"""Brings what the journals of dead jobs hold into their MLflow runs; again and again, to the same end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from mlflow_tokens.describe import tags_of
from mlflow_tokens.journal import Journal, JournalTaken, read_journal, recorded_times
from mlflow_tokens.ledger import Ledger
from mlflow_tokens.notices import logger
from mlflow_tokens.records import CarriedOver, PriceSet, Quantities, RunBound, SegmentEnd, SegmentStart
from mlflow_tokens.resume import OpenPast, late_records, left_open
from mlflow_tokens.run_report import RunReport, run_report_of
from mlflow_tokens.sinks.mlflow import MlflowSink
from mlflow_tokens.sinks.writer import BATCH
from mlflow_tokens.snapshot import Snapshot

#: Told how many of how many snapshots have been written.
Progress = Callable[[int, int], None]


class CannotSync(Exception):
    """This journal cannot be brought to MLflow now; the message says why."""


class NothingToSync(Exception):
    """There is nothing to be done for this journal; the message says why."""


@dataclass(frozen=True, slots=True)
class Synced:
    """What became of one journal. status: the run's, or None where it was complete already."""

    run: str
    points: int
    status: str | None


@dataclass(slots=True)
class _Contents:
    """What a journal says, for a run to be made of it."""

    snapshots: list[Snapshot]
    report: RunReport
    bound: RunBound
    first: SegmentStart
    last: SegmentStart
    price: PriceSet | None
    end: SegmentEnd | None
    ended_at: float
    past: OpenPast | None


def journals(directory: Path) -> list[Path]:
    """The journals in a directory; a file may be given as well.

    Raises:
        CannotSync: there is no such directory.
    """
    if directory.is_file():
        return [directory]
    if not directory.is_dir():
        raise CannotSync(f"there is no directory {directory}")
    return sorted(directory.glob("*.jsonl"))


def sync_journal(path: Path, tracking_uri: str | None, progress: Progress) -> Synced:
    """Write every point of a journal that its run lacks, and end the run as the job ended.

    A job that died without a word is KILLED, as of its last record. A journal that a job is writing is
    left alone. What was done is written into the journal, so that the next call has nothing to do.

    Args:
        tracking_uri: where the run is to be kept; None: where the job kept it.

    Raises:
        NothingToSync: a job is writing the journal, or it holds no numbers.
        CannotSync: the journal cannot be read, or MLflow does not take what it holds.
    """
    try:
        # A job that learns its run renames its journal: an empty one must not take its place.
        journal = Journal(path, create=False)
    except JournalTaken:
        raise NothingToSync("a job is writing it, and brings the rest itself") from None
    except FileNotFoundError:
        raise NothingToSync("it has just been given another name") from None
    except OSError as error:
        raise CannotSync(str(error)) from error
    try:
        contents = _read(path)
        if tracking_uri is None and contents.end is not None and not contents.end.undelivered:
            return Synced(contents.bound.run or "", 0, None)
        return _write(journal, contents, tracking_uri, progress)
    except (CannotSync, NothingToSync):
        raise
    except Exception as error:
        raise CannotSync(f"{type(error).__name__}: {error}") from error
    finally:
        # What it did not take is done again the next time.
        with suppress(OSError):
            journal.close()


def _read(path: Path) -> _Contents:
    ledger = Ledger()
    snapshots: list[Snapshot] = []
    bound = first = last = price = end = past = None
    ended_at = 0.0
    for record in read_journal(path):
        snapshot = ledger.apply(record)
        if snapshot is not None:
            snapshots.append(snapshot)
        if isinstance(record, RunBound):
            bound = record if bound is None or record.run else bound
            end = None  # another process has begun
        elif isinstance(record, SegmentStart):
            first, last, price = first or record, record, None
        elif isinstance(record, PriceSet):
            price = record
        elif isinstance(record, CarriedOver):
            past = left_open([record])
        elif isinstance(record, Quantities):
            ended_at, end = record.t_wall, None
        elif isinstance(record, SegmentEnd):
            ended_at, end = record.t_wall, record
    if not snapshots or first is None or last is None:
        raise NothingToSync("it holds no numbers")
    if bound is None:
        raise CannotSync("it does not say which run it is of")
    report = run_report_of(ledger, end.status if end else "KILLED")
    return _Contents(snapshots, report, bound, first, last, price, end, ended_at, past)


def _write(journal: Journal, contents: _Contents, tracking_uri: str | None, progress: Progress) -> Synced:
    bound = contents.bound
    if tracking_uri is not None and tracking_uri != bound.tracking_uri:
        bound = replace(bound, tracking_uri=tracking_uri)
    price = contents.price.price if contents.price else None
    sink = MlflowSink(
        bound,
        tags_of(contents.last, price),
        lambda run: _bind(journal, bound, run),
        segment=contents.first.segment,
        started_at=contents.first.t_wall,
        live=False,
    )
    _must_exist(bound.tracking_uri)
    run = sink.bind()
    path = journal.path  # it bears the run's name now
    if contents.past is not None and tracking_uri in (None, contents.bound.tracking_uri):
        for record in late_records(contents.past, run, sink, recorded_times(path)):
            journal.append(record)
        contents = _read(path)
    stored = sink.stored()
    points = 0
    for done, batch in _batches(contents.snapshots):
        points += len({point for item in batch for point, _ in item.points()} - stored)
        sink.write(batch, stored)
        progress(done, len(contents.snapshots))
    status = contents.end.status if contents.end else "KILLED"
    # The script's own run, too, is not left running when its job is dead.
    sink.end_script_run = True
    sink.close(status, end_time=contents.ended_at)
    journal.append(SegmentEnd(contents.last.segment, contents.ended_at, status))
    try:
        sink.attach(contents.report)
    except Exception as error:
        logger.warning("The run's report could not be kept with the run: %s: %s", type(error).__name__, error)
    return Synced(run, points, status)


def _bind(journal: Journal, bound: RunBound, run: str) -> None:
    if bound.run != run:
        journal.append(replace(bound, run=run))
        with suppress(OSError):
            journal.rename(f"{run}.jsonl")


def _must_exist(tracking_uri: str) -> None:
    """MLflow would make a new database where the job's is not: on another machine, say."""
    path = tracking_uri.removeprefix("sqlite:///").partition("?")[0]
    if path not in (tracking_uri, ":memory:") and not Path(path).exists():
        raise CannotSync(f"there is no database {path} here; say where the run is with --tracking-uri")


def _batches(snapshots: list[Snapshot]) -> Iterator[tuple[int, list[Snapshot]]]:
    rest, done = iter(snapshots), 0
    while batch := list(islice(rest, BATCH)):
        done += len(batch)
        yield done, batch
