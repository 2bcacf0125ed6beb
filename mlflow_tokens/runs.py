"""The runs that one process is recorded in, one after the other; on global rank 0 alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlflow_tokens.aggregate import Moment
from mlflow_tokens.cadence import Cadence
from mlflow_tokens.checkpoint import Checkpoint
from mlflow_tokens.describe import describe_segment
from mlflow_tokens.meter import Meter, Reading
from mlflow_tokens.open_run import OpenRun, end_unrecorded, open_run
from mlflow_tokens.options import Options
from mlflow_tokens.ranks import Question
from mlflow_tokens.recorder import EXIT_TIMEOUT, Rewind
from mlflow_tokens.records import RunBound, SnapshotKind
from mlflow_tokens.sinks.active_run import active_binding
from mlflow_tokens.team import Team


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A checkpoint, and where the meter and the axis stood when it was loaded."""

    checkpoint: Checkpoint
    step: int
    micro_batches: int
    position: int


class Runs:
    """Decides which run the training is recorded in now, and when a snapshot of it is taken.

    Called on the training thread; it never waits there, except at the end of a run.
    """

    def __init__(self, meter: Meter, team: Team, options: Options) -> None:
        self._meter = meter
        self._team = team
        self.options = options
        self._records = team.job.rank == 0
        self._lock = threading.RLock()
        self._closed = False
        self._run: OpenRun | None = None
        self._earlier_steps = 0
        self._checkpoint: Checkpoint | None = None
        self._resumes_from: Checkpoint | None = None
        self._loaded: _Loaded | None = None
        self._baseline: Mapping[int, Reading] = {}
        self._cadence = Cadence(options.log_every_steps)

    def step_ended(self) -> None:
        """A step has ended: ask for a snapshot if one is due."""
        if self._closed:
            return
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._rewind(loaded)
        if self._records:
            self._snapshot(self._cadence.after_step(self.steps, self._micro_batches()))

    def script_logged(self, run_id: str | None, script_step: int) -> None:
        """The script has logged a metric of its own: log ours at the same step."""
        if self._closed or not self._records:
            return
        if self._run is not None and self._run.run is not None and run_id not in (None, self._run.run):
            return
        self._snapshot(self._cadence.after_script_log(script_step, self.steps, self._micro_batches()))

    def run_ending(self, run_id: str, status: str) -> None:
        """The script is about to end a run: if it is ours, write the last snapshot first."""
        if self._closed or not self._records or not self._trained():
            return
        if self._run is not None:
            if self._run.run == run_id:
                self._end_run(status)
        elif (active := active_binding()).run in (None, run_id):
            self._begin_run(RunBound(run_id, active.tracking_uri))
            self._end_run(status)

    def run_for_script(self) -> str | None:
        """The run that we have started: a script that logs without a run of its own joins it.

        It is being started in the background at worst; it is waited for as a script waits for its own.
        """
        return None if self._closed or self._run is None else self._run.mlflow.started_run(EXIT_TIMEOUT)

    def script_started_run(self, run_id: str) -> None:
        """The script has started a run: what comes from here on is not that of the run we had started."""
        if self._closed or self._run is None:
            return
        ours = self._run.mlflow.started_run(EXIT_TIMEOUT)
        if ours is not None and ours != run_id:
            self._end_run("FINISHED")

    def checkpoint(self) -> Checkpoint:
        """Where training is now, written down in the journal under just that name (on rank 0)."""
        if self._loaded is not None:
            return self._loaded.checkpoint
        step, before = self.steps, self._checkpoint
        if before is not None and (before.step == step or self._closed or not self._trained()):
            return before
        if not self._records or not step or self._closed:
            return Checkpoint(None, "", step, step, round(time.time() * 1000))
        run = self._run or self._begin_run(active_binding())
        moment = self._moment(run, "checkpoint", self._position())
        run.recorder.put(moment)
        self._checkpoint = Checkpoint(
            run.run, run.segment, step, moment.position, round(moment.t_wall * 1000)
        )
        return self._checkpoint

    def resume(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is loaded: of this process, of an earlier one, or of another run.

        Where this process has trained already, nothing is thrown away before it trains on: what is loaded
        may be the best checkpoint, to be evaluated.
        """
        self._checkpoint = checkpoint
        if self._trained():
            meter = self._meter
            self._loaded = _Loaded(checkpoint, meter.current_step, meter.micro_batches, self._position())
        else:
            self._resumes_from = checkpoint
            self._go_to(checkpoint, self.steps, self._micro_batches())

    def close(self, status: str, *, dying: bool) -> None:
        """End the run that is recorded, and record no other. May raise; waits a few seconds at most.

        dying: the process ends with it, so that the script's own run is ended as well.
        """
        self._closed = True
        self._end_run(status, dying=dying)

    @property
    def steps(self) -> int:
        """Optimizer steps of this run, those that it had before this process included."""
        first = self._baseline.get(0)
        return self._earlier_steps + self._meter.current_step - (first.step if first else 0)

    def _trained(self) -> bool:
        """Whether a step has ended in this process that is no earlier run's."""
        first = self._baseline.get(0)
        return self._meter.current_step > (first.step if first else 0)

    def _micro_batches(self) -> int:
        first = self._baseline.get(0)
        return self._earlier_steps + self._meter.micro_batches - (first.micro_batches if first else 0)

    def _rewind(self, loaded: _Loaded) -> None:
        """The first step after a checkpoint was loaded has ended: what came after the checkpoint is lost."""
        meter = self._meter
        if self._records:
            run = self._run or self._begin_run(active_binding())
            before = self._moment(run, "checkpoint", loaded.position, question=Question(loaded.step))
            run.recorder.put(Rewind(loaded.checkpoint, before))
        self._checkpoint = loaded.checkpoint
        since = meter.current_step - loaded.step, meter.micro_batches - loaded.micro_batches
        self._go_to(loaded.checkpoint, self.steps - since[0], self._micro_batches() - since[1])

    def _go_to(self, checkpoint: Checkpoint, steps: int, micro_batches: int) -> None:
        self._earlier_steps += checkpoint.step - steps
        micro_batches += checkpoint.step - steps
        self._cadence.rewind(checkpoint.step, micro_batches, checkpoint.position)

    def _snapshot(self, position: int | None) -> None:
        if position is None:
            return
        run = self._run
        if run is None:
            run = self._begin_run(active_binding(), snapshot=True)
            position = max(position, self._position())
        run.recorder.put(self._moment(run, "step", position))

    def _moment(self, run: OpenRun, kind: SnapshotKind, position: int, **values: Any) -> Moment:
        question = values.pop("question", None) or Question(self._meter.current_step)
        return Moment(kind, question, position, run.recorder.wall(), time.monotonic(), **values)

    def _position(self) -> int:
        return self._cadence.position(self.steps, self._micro_batches())

    def _begin_run(self, bound: RunBound, *, snapshot: bool = False) -> OpenRun:
        """Open the run. snapshot: of this step there is one, for which the run is opened."""
        checkpoint, self._resumes_from = self._resumes_from, None
        self._checkpoint = checkpoint
        self._run = open_run(
            bound,
            describe_segment(self._team.job, self.options, self._meter.topology),
            self.options,
            collect=self._team.collect,
            baseline=self._baseline,
            checkpoint=checkpoint,
            position=self._position,
        )
        recorder = self._run.recorder
        self._earlier_steps = recorder.earlier_step
        if recorder.earlier_step:
            last_step = self.steps if snapshot else recorder.earlier_step
            self._cadence.restart(self.steps, self._micro_batches(), recorder.earlier_position, last_step)
        return self._run

    def _end_run(self, status: str, *, dying: bool = False) -> None:
        with self._lock:
            run, self._loaded = self._run, None
            if run is None:
                if not self._records or not (dying or self._trained()):
                    return
                bound = active_binding(dying=dying)
                if not self._trained():
                    if not bound.owned:
                        end_unrecorded(bound, status)
                    return
                run = self._begin_run(bound)
            self._run = None
        run.mlflow.end_script_run = dying
        self._meter.drop_unfinished_step()
        question = Question(self._meter.current_step, live=True, last=self._closed)
        moment = self._moment(run, "final", self._position(), question=question, status=status)
        self._checkpoint = Checkpoint(
            run.run, run.segment, self.steps, moment.position, round(moment.t_wall * 1000)
        )
        self._team.hurry(True)
        self._baseline = self._with_own_newest(run.recorder.end(moment))
        self._team.hurry(False)
        self._earlier_steps = 0
        self._cadence = Cadence(self.options.log_every_steps)

    def _with_own_newest(self, readings: Mapping[int, Reading]) -> Mapping[int, Reading]:
        """Where the end could not be recorded in time, what was done is still not the next run's."""
        if 0 in readings and readings[0].step == self._meter.current_step:
            return readings
        own = self._meter.reading(live=True)
        return readings if own is None else {**readings, 0: own}
