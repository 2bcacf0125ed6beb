"""The tracker: joins counts, clock, ranks and devices of one process into the record of its runs."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

from mlflow_tokens.checkpoint import Checkpoint, checkpoint_of
from mlflow_tokens.clock import Phase, PhaseClock, is_interactive, process_started
from mlflow_tokens.counting import (
    BatchCounts,
    Fields,
    PadPolicy,
    Scalar,
    count_batch,
    find_fields,
    fingerprint_of,
    given_counts,
    is_spread,
    local_fields,
)
from mlflow_tokens.meter import FINGERPRINTS, Meter
from mlflow_tokens.notices import say_once, set_up
from mlflow_tokens.options import Options, check_options, price_advice
from mlflow_tokens.pricing import Price
from mlflow_tokens.ranks import job_from_environment
from mlflow_tokens.recorder import EXIT_TIMEOUT
from mlflow_tokens.runs import Runs
from mlflow_tokens.signals import Terminator
from mlflow_tokens.sinks.visualdl import require_visualdl
from mlflow_tokens.sources import by_source
from mlflow_tokens.team import Team
from mlflow_tokens.topology import topology_of_process, topology_of_tensor

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
            `Price`; a name out of the price file that $MLFLOW_TOKENS_PRICES names, or out of the price book
            ("aws/h100-80gb"); or the path of a price file, for its default. Without one, tokens and
            throughput are logged and cost is not.
        log_every_steps: optimizer steps between snapshots. The interval doubles after every 200
            snapshots, and gives way to the steps at which the script logs metrics of its own.
        pad_token_id: the id of padding, used where a batch has no attention mask.
        pad: "none" states that the data is packed, without padding.
        ignore_index: label that is not trained on, for labels that go into the model.
        source_key: under this key a batch names its data source, or one source a row.
        visualdl: a VisualDL log directory to write to as well.
        jsonl: a file to append every snapshot to, one line of JSON each.
        journal_dir: where the journal is kept; default $MLFLOW_TOKENS_JOURNAL_DIR or ./.mlflow_tokens. On
            a shared disk a job that is restarted elsewhere finds it again.
        bill_gaps: bill the time between the end of a job and its restart in another allocation, too.
        silent: print nothing.

    Raises:
        ValueError: an option cannot be used; the message says what can.
        ImportError: `visualdl` is given and VisualDL is not installed.
    """

    def __init__(
        self,
        *,
        price: str | os.PathLike[str] | Price | None = None,
        log_every_steps: int = 10,
        pad_token_id: int | None = None,
        pad: str | None = None,
        ignore_index: int = -100,
        source_key: str | None = None,
        visualdl: str | os.PathLike[str] | None = None,
        jsonl: str | os.PathLike[str] | None = None,
        journal_dir: str | os.PathLike[str] | None = None,
        bill_gaps: bool = False,
        silent: bool = False,
    ) -> None:
        global _current
        self.options: Options = check_options(
            price=price,
            log_every_steps=log_every_steps,
            pad_token_id=pad_token_id,
            pad=pad,
            ignore_index=ignore_index,
            source_key=source_key,
            visualdl=visualdl,
            jsonl=jsonl,
            journal_dir=journal_dir,
            bill_gaps=bill_gaps,
            silent=silent,
            environ=os.environ,
        )
        if visualdl is not None:
            require_visualdl()
        self._job = job_from_environment(os.environ)
        set_up(silent or self._job.rank != 0)
        if self.options.price.price is None:
            say_once("price", price_advice(), level=20)
        for notice in self.options.price.notices:
            say_once(notice, notice)
        # What an earlier tracker of this process has charged is not charged again.
        started = process_started() if _charged_until is None else _charged_until
        self.meter = Meter(self._job.rank, PhaseClock(started))
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._closed, self._left = False, threading.Event()
        self._failure: str | None = None
        self._source: str | Sequence[str] | None = None
        self._team = Team(self._job, self.meter)
        self.runs = Runs(self.meter, self._team, self.options)
        atexit.register(self._at_exit)
        self._terminator = Terminator(lambda: self.close("KILLED", dying=True))
        if self._job.rank == 0:
            self._terminator.install()
        _current = self

    # ---- what a loop calls ------------------------------------------------------------------------

    def count(
        self,
        batch: Any = None,
        *,
        computed: int | None = None,
        valid: int | None = None,
        trained: int | None = None,
        source: str | Sequence[str] | None = None,
    ) -> None:
        """Count one micro-batch of the training data, before it is trained on.

        Args:
            batch: what the loader gave: a mapping with input_ids (and attention_mask, labels), an array
                of ids, or a sequence of those. Arrays are Paddle's or NumPy's.
            computed, valid, trained: token counts, instead of a batch; leave out what is unknown.
            source: the data source that it is from, or one source a row, where batches are mixed; by
                default what the batch holds under the option `source_key`, or what `source()` was told.

        Never raises: what cannot be counted makes the totals unknown, with one line that says why.
        """
        try:
            if batch is None:
                counts = given_counts(computed, valid, trained)
            else:
                counts = self.count_fields(find_fields(batch))
                if counts.computed is None:
                    reason = f"{counts.reason}; name them input_ids, or say count(computed=…, valid=…)"
                    counts = counts._replace(reason=reason)
                key = self.options.source_key
                if source is None and key is not None and isinstance(batch, Mapping):
                    source = batch.get(key)
            self.count_tokens(self.of_source(counts, source))
        except Exception as error:
            self.counting_failed(error)

    def source(self, names: str | Sequence[str] | None) -> None:
        """Say which data source the micro-batches from here on are from: one, or one a row; None: unnamed."""
        self._source = names

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
        """What to save in a checkpoint: `paddle.save({..., "tokens": tracker.state_dict()}, path)`.

        A few names and numbers, and no totals: at this moment rank 0 may not have those of the other
        ranks yet. It has them written down for this step, so that a restart finds them. Never waits.
        """
        try:
            return self.runs.checkpoint().to_state()
        except Exception as error:
            say_once("state_dict", "The checkpoint cannot be marked: %r", error)
            step = self.runs.steps
            return Checkpoint(None, "", step, step, round(time.time() * 1000)).to_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Say that training goes on from the checkpoint that this was saved in, before its next step.

        Totals go on from there. What had been trained after the checkpoint stays billed, and is no longer
        effective. The run of the checkpoint is continued if none is active; an active run other than that
        becomes its child, and begins with the totals of the checkpoint. Never raises: without a usable
        state, totals go on from the end of the run's journal.
        """
        try:
            if state:
                self.runs.resume(checkpoint_of(state))
        except Exception as error:
            say_once("resume", "The checkpoint does not say where it was saved: %s", error)

    def close(self, status: str = "FINISHED", *, dying: bool = False) -> None:
        """Take the last snapshot, write it and stop. Waits a few seconds at most; never raises.

        Args:
            dying: the process ends now, so that the script cannot end its run: it is ended for it.
        """
        global _current, _charged_until
        # A forked child has a copy of the tracker, but the run is its parent's.
        if os.getpid() != self._pid:
            return
        with self._lock:
            closing, self._closed = self._closed, True
        if closing:
            self._left.wait(4 * EXIT_TIMEOUT)
            return
        try:
            self.runs.close(status, dying=dying)
        except Exception as error:
            say_once("close", "The last snapshot could not be taken: %s: %s", type(error).__name__, error)
        self._team.leave(EXIT_TIMEOUT)
        self._terminator.remove()
        _charged_until = time.monotonic()
        atexit.unregister(self._at_exit)
        if _current is self:
            _current = None
        self._left.set()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(status_of(kind, error))

    # ---- what hooks call --------------------------------------------------------------------------

    def count_tokens(self, counts: BatchCounts) -> None:
        """Add a counted micro-batch, and say once why something about it is unknown."""
        if self._closed:
            return
        if counts.valid is None and counts.reason is not None:
            what = "Tokens are" if counts.computed is None else "Valid tokens are"
            say_once("unknown", "%s unknown: %s.", what, counts.reason)
        self._find_topology()
        self.meter.count(counts)

    def _find_topology(self) -> None:
        """Look whether fleet has been set up, which scripts do before they train."""
        meter = self.meter
        if self._job.world_size > 1 and meter.topology is None and meter.micro_batches < FINGERPRINTS:
            meter.topology = topology_of_process()

    def learn(self, pad_policy: PadPolicy) -> None:
        """How padding is told from text turns out to be known, from the batches to come on."""
        self.options = replace(self.options, pad_policy=pad_policy)
        self.runs.options = self.options

    def count_fields(self, fields: Fields) -> BatchCounts:
        """Count the arrays of a batch, by rows where the sample of lengths or its sources need that."""
        meter = self.meter
        if fields.ids and is_spread(fields.ids[0]):
            meter.topology = meter.topology or topology_of_tensor(fields.ids[0], self._job.rank)
            if self._job.rank not in fields.ids[0].process_mesh.process_ids:
                return BatchCounts(0, 0, 0)
            fields = local_fields(fields)
        self._find_topology()
        by_row = meter.samples_lengths or self._source is not None or self.options.source_key is not None
        counts = count_batch(fields, self.options.pad_policy, by_row=by_row)
        return counts._replace(fingerprint=fingerprint_of(fields)) if meter.wants_fingerprint else counts

    def of_source(self, counts: BatchCounts, names: str | Sequence[str] | None = None) -> BatchCounts:
        """The counts with the tokens of each source: of `names`, or of what `source()` was told."""
        names = self._source if names is None else names
        if names is None:
            return counts
        try:
            return counts._replace(by_source=by_source(counts, names))
        except ValueError as error:
            say_once("source", "Tokens of some batches are of no known source: %s.", error)
            return counts

    def count_routed(self, routed: int | None) -> None:
        """Add tokens x experts that a gate of the newest micro-batch's model has chosen; None: unknown."""
        if not self._closed:
            self.meter.count_routed(routed)

    def step_skipped(self) -> None:
        """The optimizer has left out a step: its tokens were computed, and are not effective."""
        if not self._closed:
            self.meter.skip_step()

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
        if not self._closed:
            self.meter.step()
            self.runs.step_ended()

    def ends_with(self, status: str) -> None:
        """An exception, or an exit status other than 0, is about to end the process."""
        self._failure = status

    def counting_failed(self, error: BaseException) -> None:
        """Counting went wrong: the totals are unknown from here on, and training goes on."""
        say_once(
            "counting",
            "Counting failed, token totals are unknown from here on (a Tracker's count(computed=…, valid=…) "
            "does not depend on the batch): %r",
            error,
        )
        self.meter.count(BatchCounts(None, None, None))

    def _at_exit(self) -> None:
        failure = self._failure or _uncaught()
        self.close(failure or "FINISHED", dying=failure is not None)
        if failure == "KILLED":
            # After a KeyboardInterrupt Python ends as SIGINT does, which a shell's loop needs to know. It
            # forgets to where code has been compiled from a string since, as imports for the flush do.
            with suppress(KeyboardInterrupt):
                exec("raise KeyboardInterrupt")


def _uncaught() -> str | None:
    """How the exception that has ended the script ends its run: Python keeps what it has printed last.

    In an interactive session that may be of any earlier line.
    """
    error = getattr(sys, "last_value", None)
    return None if error is None or is_interactive() else status_of(type(error), error)


def status_of(kind: type[BaseException] | None, error: BaseException | None = None) -> str:
    """MLflow's run status for a block or a process that ends with this exception."""
    if kind is None:
        return "FINISHED"
    if issubclass(kind, SystemExit):
        return "FINISHED" if getattr(error, "code", None) in (None, 0) else "FAILED"
    return "KILLED" if issubclass(kind, KeyboardInterrupt) else "FAILED"
