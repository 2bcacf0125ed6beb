"""Sees what the script itself logs, and how its runs and the script itself end."""

from __future__ import annotations

import sys
from typing import Any

from mlflow_tokens.notices import say_once
from mlflow_tokens.patches import Patches
from mlflow_tokens.sinks.base import is_our_thread
from mlflow_tokens.tracker import Tracker, status_of

#: MLflow's own monitor logs by a count of its samples.
_NOT_THE_SCRIPTS = "system/"

_active: ScriptHooks | None = None
_waits_for_visualdl = False


class ScriptHooks:
    """Tells the tracker at which steps the script logs, and when the script ends a run."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._patches = Patches()

    def install(self) -> None:
        """Wrap the methods of MLflow's client that all its logging goes through, and VisualDL's."""
        import mlflow
        from mlflow import MlflowClient
        from mlflow.tracking import fluent
        from mlflow.utils.import_hooks import register_post_import_hook

        self._patches.wrap(MlflowClient, "log_metric", self._log_metric)
        self._patches.wrap(MlflowClient, "log_batch", self._log_batch)
        self._patches.wrap(MlflowClient, "set_terminated", self._set_terminated)
        for owner in (mlflow, fluent):
            self._patches.wrap(owner, "start_run", self._start_run)
        # What log_metric() and its like call to find the active run, or to start one where there is none.
        if "_get_or_start_run" in vars(fluent):
            self._patches.wrap(fluent, "_get_or_start_run", self._get_or_start_run)
        global _active, _waits_for_visualdl
        _active = self
        if (visualdl := sys.modules.get("visualdl")) is not None:
            self.wrap_visualdl(visualdl)
        elif not _waits_for_visualdl:
            _waits_for_visualdl = True
            register_post_import_hook(_visualdl_imported, "visualdl")

        self._patches.wrap(sys, "excepthook", self._excepthook)
        self._patches.wrap(sys, "exit", self._exit)

    def remove(self) -> None:
        """Put everything back."""
        global _active
        _active = None
        self._patches.revert()

    def wrap_visualdl(self, visualdl: Any) -> None:
        """Follow what the script writes to VisualDL, now that it is there."""
        self._patches.wrap(visualdl.LogWriter, "add_scalar", self._add_scalar)

    def _log_metric(
        self, original: Any, client: Any, run_id: str, key: str, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(client, run_id, key, *args, **kwargs)
        # log_metric(run_id, key, value, timestamp, step, …)
        step = kwargs.get("step", args[2] if len(args) > 2 else None)
        if not key.startswith(_NOT_THE_SCRIPTS):
            self._logged(run_id, step)
        return result

    def _log_batch(self, original: Any, client: Any, run_id: str, *args: Any, **kwargs: Any) -> Any:
        result = original(client, run_id, *args, **kwargs)
        metrics = kwargs.get("metrics", args[0] if args else None) or ()
        steps = [metric.step for metric in metrics if not metric.key.startswith(_NOT_THE_SCRIPTS)]
        if steps:
            self._logged(run_id, max(steps))
        return result

    def _add_scalar(self, original: Any, writer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(writer, *args, **kwargs)
        self._logged(None, kwargs.get("step", args[2] if len(args) > 2 else None))
        return result

    def _excepthook(self, original: Any, kind: type[BaseException], *args: Any) -> None:
        """An exception is about to end the process: our run ends as FAILED or KILLED."""
        self._tracker.ends_with(status_of(kind, args[0] if args else None))
        original(kind, *args)

    def _exit(self, original: Any, *args: Any) -> Any:
        """The script leaves: with a status other than 0 it has failed, unless it catches this and goes on."""
        self._tracker.ends_with(status_of(SystemExit, SystemExit(*args)))
        return original(*args)

    def _start_run(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        run = original(*args, **kwargs)
        if not is_our_thread():
            try:
                self._tracker.runs.script_started_run(run.info.run_id)
            except Exception as error:
                say_once("start_run", "The run that we had started could not be ended: %r", error)
        return run

    def _get_or_start_run(self, original: Any) -> Any:
        if not is_our_thread():
            try:
                self._join_our_run()
            except Exception as error:
                say_once("join", "The script's metrics could not join the run of ours: %r", error)
        return original()

    def _join_our_run(self) -> None:
        import mlflow

        if mlflow.active_run() is None and (run_id := self._tracker.runs.run_for_script()) is not None:
            mlflow.start_run(run_id=run_id)

    def _set_terminated(
        self, original: Any, client: Any, run_id: str, status: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if not is_our_thread():
            try:
                self._tracker.runs.run_ending(run_id, status or "FINISHED")
            except Exception as error:
                say_once("run_ending", "The last snapshot could not be taken: %r", error)
        return original(client, run_id, status, *args, **kwargs)

    def _logged(self, run_id: str | None, step: Any) -> None:
        if is_our_thread() or not isinstance(step, int):
            return
        try:
            self._tracker.runs.script_logged(run_id, step)
        except Exception as error:
            say_once("script_logged", "The script's steps could not be followed: %r", error)


def _visualdl_imported(module: Any) -> None:
    """The script has imported VisualDL after `autolog()`."""
    if _active is not None:
        try:
            _active.wrap_visualdl(module)
        except Exception as error:
            say_once("visualdl", "What the script writes to VisualDL cannot be followed: %r", error)
