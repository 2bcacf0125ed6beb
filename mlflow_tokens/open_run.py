"""Opens the record of one run: which run it is, its journal, and the sinks that its snapshots go to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

from mlflow_tokens.checkpoint import Checkpoint
from mlflow_tokens.describe import tags_of
from mlflow_tokens.journal import JournalTaken
from mlflow_tokens.meter import Reading
from mlflow_tokens.notices import logger
from mlflow_tokens.options import Options
from mlflow_tokens.recorder import Collect, Recorder
from mlflow_tokens.records import PriceSet, RunBound, SegmentStart
from mlflow_tokens.resume import History, find_journal, run_of
from mlflow_tokens.sinks.active_run import active_run_metrics
from mlflow_tokens.sinks.jsonl import JsonlSink
from mlflow_tokens.sinks.mlflow import MlflowSink, is_ours
from mlflow_tokens.sinks.visualdl import VisualDLSink
from mlflow_tokens.sinks.writer import Writer
from mlflow_tokens.spool import Spool

#: Seconds that the recorder waits for MLflow to tell what it has of a run.
HISTORY_TIMEOUT = 8.0

Answer = TypeVar("Answer")


@dataclass(slots=True)
class OpenRun:
    """A run that is being recorded. run: its id, None until it is known."""

    recorder: Recorder
    mlflow: MlflowSink
    run: str | None
    segment: str


def open_run(
    bound: RunBound,
    segment: SegmentStart,
    options: Options,
    *,
    collect: Collect,
    baseline: Mapping[int, Reading],
    checkpoint: Checkpoint | None,
    position: Callable[[], int],
) -> OpenRun:
    """Open the journal of a run and begin to record it.

    A checkpoint names the run to go on with, unless the script has another one active: then that one
    is its child. Where another process is recording the run already, the new one gets a run of its own:
    two jobs in one run would make one sum of both.
    """
    if checkpoint is not None and checkpoint.run is None:
        # It was saved before its run had an id, which the journal has learnt since.
        saved_in = find_journal(options.journal_dir, None, checkpoint.segment)
        checkpoint = replace(checkpoint, run=run_of(saved_in) if saved_in else None)
    if bound.run is None and checkpoint is not None and checkpoint.run is not None:
        bound = replace(bound, run=checkpoint.run)
    same_run = checkpoint is not None and checkpoint.run in (None, bound.run)
    directory = options.journal_dir
    path = find_journal(directory, bound.run, checkpoint.segment if checkpoint and same_run else "")
    if path is not None and bound.run is None:
        bound = replace(bound, run=run_of(path))
    price_now = options.price.at(segment.t_wall)
    price = PriceSet(segment.t_wall, price_now) if price_now else None
    changes = [PriceSet(c.t_wall, c.price) for c in options.price.changes if c.t_wall > segment.t_wall]
    displaced = False

    def record(bound: RunBound, name: str) -> Recorder:
        return Recorder(
            segment=segment,
            price=price,
            price_changes=changes,
            bound=bound,
            journal_path=directory / f"{name}.jsonl",
            collect=collect,
            baseline=baseline,
            checkpoint=checkpoint,
            position=position,
        )

    name = path.stem if path else bound.run or segment.segment
    try:
        recorder = record(bound, name)
    except JournalTaken:
        logger.warning(
            "Another process is recording run %s (its journal is locked): this one is recorded in a run of "
            "its own.",
            bound.run,
        )
        displaced, name = True, segment.segment
        bound = replace(bound, run=None, owned=True)
        recorder = record(bound, name)
    tags = tags_of(segment, price_now)
    if checkpoint is not None and checkpoint.run not in (None, bound.run):
        tags["mlflow_tokens.parent_run"] = checkpoint.run or ""
    opened: OpenRun

    def run_known(run: str) -> None:
        opened.run = run
        recorder.run_known(run)

    # A run that was never started is known in MLflow by the segment that its journal begins with.
    identity = segment.segment if bound.run is not None else name
    nameless = path is not None and bound.run is None
    mlflow = MlflowSink(
        bound, tags, run_known, segment=identity, live=not displaced, may_exist=nameless and not displaced
    )
    opened = OpenRun(recorder, mlflow, bound.run, segment.segment)
    writer = Writer(mlflow, recorder.spool)
    writers = [writer]
    if options.visualdl is not None:
        writers.append(Writer(VisualDLSink(options.visualdl, tags), recorder.spool))
    if options.jsonl is not None:
        writers.append(Writer(JsonlSink(options.jsonl, tags), recorder.spool))

    def history_of(run: str) -> History:
        sink = mlflow if run == bound.run else _other_run(run, bound)
        return _AskedHistory(sink, writer, began_empty=run == bound.run and began_empty)

    # A run that this process recorded before, if only in vain, is not as empty as it was.
    began_empty = not baseline and bound.run is not None and _began_empty(bound.run)
    may_have_history = bound.run is not None or checkpoint is not None
    recorder.start(
        writers,
        history_of if may_have_history else None,
        lambda question: writer.ask(lambda: question(mlflow)),
    )
    return opened


def end_unrecorded(bound: RunBound, status: str) -> None:
    """End a run of the script's in which nothing was recorded. Waits no longer than any end of a run."""
    sink = MlflowSink(bound, {}, lambda run: None, segment="")
    sink.end_script_run = True
    writer = Writer(sink, Spool(lambda seq: ()))
    writer.end(None, status)
    writer.wait(time.monotonic() + writer.exit_timeout)


def _began_empty(run: str) -> bool:
    """Whether the script has the run active, and it had nothing of ours when the script started it."""
    names = active_run_metrics(run)
    return names is not None and not any(is_ours(name) for name in names)


def _other_run(run: str, bound: RunBound) -> MlflowSink:
    """For reading alone."""
    return MlflowSink(RunBound(run, bound.tracking_uri), {}, lambda run: None, segment="", live=False)


class _AskedHistory:
    """A run's history, read on the thread that writes to MLflow."""

    def __init__(self, sink: MlflowSink, writer: Writer, *, began_empty: bool) -> None:
        self._sink, self._writer, self._began_empty = sink, writer, began_empty

    def latest(self, but: AbstractSet[int] = frozenset()) -> Mapping[str, tuple[float, int, int]]:
        try:
            return _answer(self._writer.ask(lambda: self._sink.latest(but)))
        except Exception:
            if self._began_empty:  # MLflow said so when the script started it
                return {}
            raise

    def at(self, timestamp_ms: int) -> Mapping[str, float]:
        return _answer(self._writer.ask(lambda: self._sink.at(timestamp_ms)))

    def tags(self) -> Mapping[str, str]:
        return _answer(self._writer.ask(self._sink.tags))


def _answer(future: Future[Answer]) -> Answer:
    return future.result(timeout=HISTORY_TIMEOUT)
