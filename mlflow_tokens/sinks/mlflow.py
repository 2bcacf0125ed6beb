"""Snapshots into one MLflow run, bound to its id and not to a thread's active run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlflow_tokens.metrics import Snapshot
from mlflow_tokens.sinks.base import EXIT_TIMEOUT_LOCAL, EXIT_TIMEOUT_REMOTE
from mlflow_tokens.sinks.randomness import is_served, leave_the_scripts_random_numbers_alone


@dataclass(frozen=True, slots=True)
class RunBinding:
    """The run to write to. run_id None: none was active, so one is started (and ended) by the sink."""

    run_id: str | None
    tracking_uri: str


def active_binding() -> RunBinding:
    """The run that is active on this thread, if there is one. Asks no server."""
    import mlflow

    run = mlflow.active_run()
    return RunBinding(run.info.run_id if run else None, mlflow.get_tracking_uri())


class MlflowSink:
    """Writes with `log_batch`, as many snapshots a request as MLflow takes, with each snapshot's own time.

    A repeated request is harmless: MLflow drops exact repeats of (name, time, step, value).
    """

    name = "MLflow"
    in_order = False

    def __init__(self, binding: RunBinding, tags: Mapping[str, str], on_run: Callable[[str], None]) -> None:
        self._binding = binding
        remote = is_served(binding.tracking_uri)
        self.exit_timeout = EXIT_TIMEOUT_REMOTE if remote else EXIT_TIMEOUT_LOCAL
        self._tags = dict(tags)
        self._on_run = on_run
        self._run_id: str | None = None
        self._run_known = threading.Event()
        self._tagged = False

    def started_run(self, timeout: float) -> str | None:
        """The id of the run that this sink started, waited for `timeout` s; None if it started none."""
        return self._run_id if self._binding.run_id is None and self._run_known.wait(timeout) else None

    def write(self, snapshots: Sequence[Snapshot]) -> None:
        """Write snapshots, and with the first one the tags."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric, RunTag
        from mlflow.utils.validation import MAX_METRICS_PER_BATCH

        if self._run_id is None:
            leave_the_scripts_random_numbers_alone(self._binding.tracking_uri)
        run_id = self._run_id or self._bind()
        client = MlflowClient(self._binding.tracking_uri)
        metrics = [
            Metric(name, float(value), snapshot.timestamp_ms, snapshot.position)
            for snapshot in snapshots
            for name, value in snapshot.metrics.items()
        ]
        for start in range(0, len(metrics), MAX_METRICS_PER_BATCH):
            tags = [] if self._tagged else [RunTag(key, value) for key, value in self._tags.items()]
            client.log_batch(run_id, metrics=metrics[start : start + MAX_METRICS_PER_BATCH], tags=tags)
            self._tagged = True

    def close(self, status: str) -> None:
        """End the run if this sink started it; a run of the user's is the user's to end."""
        import mlflow

        if self._run_id is not None and self._binding.run_id is None:
            mlflow.end_run(status)

    def _bind(self) -> str:
        if self._binding.run_id is not None:
            self._run_id = self._binding.run_id
        else:
            import mlflow

            # On this thread only: MLflow's stack of active runs is a thread's own, so the script's
            # later start_run() does not find one in its way. start_run() gives the run its
            # user and git commit, and obeys MLFLOW_RUN_ID and MLFLOW_EXPERIMENT_NAME.
            self._run_id = mlflow.start_run(run_name=os.environ.get("MLFLOW_RUN_NAME")).info.run_id
        self._run_known.set()
        self._on_run(self._run_id)
        return self._run_id
