"""The tracker: joins counts, clock, ranks and devices of one process into the record of its runs."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from mlflow_tokens.cadence import Cadence
from mlflow_tokens.clock import Phase, PhaseClock, process_started
from mlflow_tokens.counting import BatchCounts, Scalar, count_batch, find_fields, given_counts
from mlflow_tokens.describe import describe_segment, tags_of
from mlflow_tokens.meter import Meter, Reading
from mlflow_tokens.notices import say_once, set_up
from mlflow_tokens.options import Options, check_options, price_advice
from mlflow_tokens.pricing import Price
from mlflow_tokens.ranks import Question, job_from_environment
from mlflow_tokens.recorder import EXIT_TIMEOUT, Moment, Recorder
from mlflow_tokens.records import SCHEMA, PriceSet, RunBound
from mlflow_tokens.sinks.base import Writer
from mlflow_tokens.sinks.mlflow import MlflowSink, RunBinding, active_binding
from mlflow_tokens.sinks.visualdl import VisualDLSink, require_visualdl
from mlflow_tokens.team import Team

_current: Tracker | None = None
_charged_until: float | None = None


def current() -> Tracker | None:
    """The tracker of this process: the newest one that is not closed, or None."""
    return _current


class Tracker:
    """Counts tokens, time and cost of a training loop and logs them to MLflow and VisualDL.

    With no patching and no framework::

        with mlflow_tokens.Tracker(price="2.0 USD/device-hour") as tracker:
            for batch in loader:
                tracker.count(batch)            # or tracker.count(computed=4096, valid=3977)
                ...                             # forward, backward, optimizer step
                tracker.step()

    Snapshots go to the MLflow run that is active at the first of them; if there is none, a run is
    started (named by $MLFLOW_RUN_NAME, if set), and ended with the tracker. In a distributed job every
    rank makes a tracker, and only global rank 0 logs.

    Args:
        price: such as "2.0 USD/device-hour", "15 CNY/device-hour", "98.32 USD/instance-hour x8", or a
            `Price`. Without one, tokens and throughput are logged and cost is not.
        log_every_steps: optimizer steps between snapshots. The interval doubles after every 200
            snapshots, and gives way to the steps at which the script logs metrics of its own.
        pad_token_id: the id of padding, used where a batch has no attention mask.
        pad: "none" states that the data is packed, without padding.
        ignore_index: label that is not trained on, for labels that go into the model.
        visualdl: a VisualDL log directory to write to as well.
        journal_dir: where the journal is kept; default $MLFLOW_TOKENS_JOURNAL_DIR or ./.mlflow_tokens.
        silent: print nothing.

    Raises:
        ValueError: an option cannot be used; the message says what can.
        ImportError: `visualdl` is given and VisualDL is not installed.
    """

    def __init__(
        self,
        *,
        price: str | Price | None = None,
        log_every_steps: int = 10,
        pad_token_id: int | None = None,
        pad: str | None = None,
        ignore_index: int = -100,
        visualdl: str | os.PathLike[str] | None = None,
        journal_dir: str | os.PathLike[str] | None = None,
        silent: bool = False,
    ) -> None:
        global _current
        self.options: Options = check_options(
            price=price,
            log_every_steps=log_every_steps,
            pad_token_id=pad_token_id,
            pad=pad,
            ignore_index=ignore_index,
            visualdl=visualdl,
            journal_dir=journal_dir,
            silent=silent,
            environ=os.environ,
        )
        if visualdl is not None:
            require_visualdl()
        self._job = job_from_environment(os.environ)
        set_up(silent or self._job.rank != 0)
        if self.options.price is None:
            say_once("price", price_advice(), level=20)
        # What an earlier tracker of this process has charged is not charged again.
        started = process_started() if _charged_until is None else _charged_until
        self.meter = Meter(self._job.rank, PhaseClock(started))
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._closed = False
        self._failure: str | None = None
        self._recorder: Recorder | None = None
        self._mlflow: MlflowSink | None = None
        self._run_id: str | None = None
        self._segment = ""
        self._earlier_steps = 0
        self._baseline: Mapping[int, Reading] = {}
        self._cadence = Cadence(log_every_steps)
        self._team = Team(self._job, self.meter)
        atexit.register(self._at_exit)
        _current = self

    # ---- what a loop calls ------------------------------------------------------------------------

    def count(
        self,
        batch: Any = None,
        *,
        computed: int | None = None,
        valid: int | None = None,
        trained: int | None = None,
    ) -> None:
        """Count one micro-batch of the training data, before it is trained on.

        Args:
            batch: what the loader gave: a mapping with input_ids (and attention_mask, labels), an array
                of ids, or a sequence of those. Arrays are Paddle's or NumPy's.
            computed, valid, trained: token counts, instead of a batch; leave out what is unknown.

        Never raises: what cannot be counted makes the totals unknown, with one line that says why.
        """
        try:
            if batch is None:
                self.count_tokens(given_counts(computed, valid, trained))
            else:
                self.count_tokens(count_batch(find_fields(batch), self.options.pad_policy))
        except Exception as error:
            self.counting_failed(error)

    def step(self) -> None:
        """Say that an optimizer step has ended: what was counted since the last one belongs to it."""
        try:
            self.step_ended()
        except Exception as error:
            self.counting_failed(error)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Charge the time of the block to a phase: `with tracker.phase("eval"): evaluate()`."""
        clock = self.meter.clock
        before = clock.phase
        clock.switch(name)
        try:
            yield
        finally:
            clock.switch(before)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint carries: the run, the segment and the step, no totals (see the journal)."""
        return {"schema": SCHEMA, "run": self._run_id, "segment": self._segment, "step": self._steps()}

    def close(self, status: str = "FINISHED") -> None:
        """Take the last snapshot, write it and stop. Waits a few seconds at most; never raises."""
        global _current, _charged_until
        with self._lock:
            # A forked child has a copy of the tracker, but the run is its parent's.
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
        try:
            self._end_run(status)
        except Exception as error:
            say_once("close", "The last snapshot could not be taken: %s: %s", type(error).__name__, error)
        self._team.leave(EXIT_TIMEOUT)
        _charged_until = time.monotonic()
        atexit.unregister(self._at_exit)
        if _current is self:
            _current = None

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(status_of(kind))

    # ---- what hooks call --------------------------------------------------------------------------

    def count_tokens(self, counts: BatchCounts) -> None:
        """Add a counted micro-batch, and say once why something about it is unknown."""
        if self._closed:
            return
        if counts.valid is None and counts.reason is not None:
            what = "Tokens are" if counts.computed is None else "Valid tokens are"
            say_once("unknown", "%s unknown: %s.", what, counts.reason)
        self.meter.count(counts)

    def trains(self) -> None:
        """A micro-batch goes into a model that may be the trained one: startup or evaluation is over."""
        if self.meter.clock.phase != "train":
            self.meter.clock.switch("train")

    def evaluates(self) -> None:
        """The model is called without training it.

        Between two steps, the time since the last one has been evaluation from its beginning.
        """
        clock = self.meter.clock
        if clock.phase == "train" and not self.meter.in_step:
            clock.reclassify("eval")
        elif clock.phase != "eval":
            clock.switch("eval")

    def count_labels(self, trained: Scalar) -> None:
        """Add the trained tokens of the newest micro-batch, seen on their way into the loss."""
        self.meter.count_labels(trained)

    def step_ended(self) -> None:
        """End a step and ask for a snapshot if one is due."""
        if self._closed:
            return
        self.meter.step()
        if self._job.rank == 0:
            self._snapshot(self._cadence.after_step(self._steps(), self._micro_batches()))

    def script_logged(self, run_id: str | None, script_step: int) -> None:
        """The script has logged a metric of its own: log ours at the same step."""
        if (
            self._closed
            or self._job.rank != 0
            or (self._run_id is not None and run_id not in (None, self._run_id))
        ):
            return
        self._snapshot(self._cadence.after_script_log(script_step, self._steps(), self._micro_batches()))

    def run_ending(self, run_id: str, status: str) -> None:
        """The script is about to end a run: if it is ours, write the last snapshot first."""
        if self._closed or self._job.rank != 0 or not self._steps():
            return
        if self._run_id == run_id or (self._recorder is None and active_binding().run_id in (None, run_id)):
            if self._recorder is None:
                self._begin_run(RunBinding(run_id, active_binding().tracking_uri))
            self._end_run(status)

    def run_for_script(self) -> str | None:
        """The run that we have started: a script that logs without a run of its own joins it.

        It is being started in the background at worst; it is waited for as a script waits for its own.
        """
        return None if self._closed or self._mlflow is None else self._mlflow.started_run(EXIT_TIMEOUT)

    def script_started_run(self, run_id: str) -> None:
        """The script has started a run: what comes from here on is not that of the run we had started."""
        if self._closed or self._mlflow is None:
            return
        ours = self._mlflow.started_run(EXIT_TIMEOUT)
        if ours is not None and ours != run_id:
            self._end_run("FINISHED")

    def failed(self, kind: type[BaseException]) -> None:
        """An exception is about to end the process."""
        self._failure = status_of(kind)

    def counting_failed(self, error: BaseException) -> None:
        """Counting went wrong: the totals are unknown from here on, and training goes on."""
        say_once("counting", "Counting failed, token totals are unknown from here on: %r", error)
        self.meter.count(BatchCounts(None, None, None))

    # ---- runs -------------------------------------------------------------------------------------

    def _steps(self) -> int:
        """Optimizer steps of this run, those that it had before this tracker included."""
        first = self._baseline.get(0)
        return self._earlier_steps + self.meter.current_step - (first.step if first else 0)

    def _micro_batches(self) -> int:
        first = self._baseline.get(0)
        return self._earlier_steps + self.meter.micro_batches - (first.micro_batches if first else 0)

    def _snapshot(self, position: int | None) -> None:
        if position is None:
            return
        recorder = self._recorder
        if recorder is None:
            recorder = self._begin_run(active_binding())
            if recorder.earlier.step:
                position = self._cadence.restart(
                    self._steps(), self._micro_batches(), recorder.earlier.position
                )
        question = Question(self.meter.current_step)
        recorder.put(Moment("step", question, position, time.time(), time.monotonic()))

    def _begin_run(self, binding: RunBinding) -> Recorder:
        segment = describe_segment(self._job, self.options)
        self._run_id, self._segment = binding.run_id, segment.segment
        price = self.options.price
        recorder = Recorder(
            segment=segment,
            price=PriceSet(segment.t_wall, price) if price else None,
            journal_path=self.options.journal_dir / f"{binding.run_id or segment.segment}.jsonl",
            collect=self._team.collect,
            baseline=self._baseline,
            position=lambda: self._cadence.position(self._steps(), self._micro_batches()),
        )
        tags = tags_of(segment, self.options.price)

        def run_known(run_id: str) -> None:
            if self._recorder is recorder:
                self._run_id = run_id
            recorder.run_known(RunBound(run_id, binding.tracking_uri))

        self._mlflow = MlflowSink(binding, tags, run_known)
        writers = [Writer(self._mlflow)]
        if self.options.visualdl is not None:
            writers.append(Writer(VisualDLSink(self.options.visualdl, tags)))
        self._recorder, self._earlier_steps = recorder, recorder.earlier.step
        recorder.start(writers)
        return recorder

    def _end_run(self, status: str) -> None:
        with self._lock:
            recorder = self._recorder
            if recorder is None:
                if self._job.rank != 0 or not self._steps():
                    return
                recorder = self._begin_run(active_binding())
            self._recorder = None
        self.meter.drop_unfinished_step()
        position = self._cadence.position(self._steps(), self._micro_batches())
        question = Question(self.meter.current_step, live=True, last=self._closed)
        moment = Moment("final", question, position, time.time(), time.monotonic(), status)
        self._team.hurry(True)
        self._baseline = self._with_own_newest(recorder.end(moment))
        self._team.hurry(False)
        self._run_id = self._mlflow = None
        self._earlier_steps = 0
        self._cadence = Cadence(self.options.log_every_steps)

    def _with_own_newest(self, readings: Mapping[int, Reading]) -> Mapping[int, Reading]:
        """Where the end could not be recorded in time, what was done is still not the next run's."""
        if 0 in readings and readings[0].step == self.meter.current_step:
            return readings
        own = self.meter.reading(live=True)
        return readings if own is None else {**readings, 0: own}

    def _at_exit(self) -> None:
        self.close(self._failure or "FINISHED")


def status_of(kind: type[BaseException] | None) -> str:
    """MLflow's run status for a block or a process that ends with this exception."""
    if kind is None or (issubclass(kind, SystemExit)):
        return "FINISHED"
    return "KILLED" if issubclass(kind, KeyboardInterrupt) else "FAILED"
