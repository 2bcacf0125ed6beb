"""The script's own MLflow run: which one is active, and where a run is to be started if none is."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow_tokens.records import RunBound

_SQLITE = re.compile(r"(?P<scheme>sqlite(\+\w+)?:///)(?P<path>[^?]+)(?P<options>.*)", re.DOTALL)


def active_binding(*, dying: bool = False) -> RunBound:
    """The run that is active on this thread or, if none is, what is known of the one to be started.

    Asks no server. A run that MLflow would resume ($MLFLOW_RUN_ID) is to be started too.

    dying: a thread of ours may ask, in the place of the main thread, whose run it is then.
    """
    import mlflow
    from mlflow.tracking import fluent

    uri = absolute_uri(mlflow.get_tracking_uri())
    run = mlflow.active_run()
    if run is None and dying:
        run = next(reversed(_active_runs().get(threading.main_thread().ident, [])), None)
    if run is not None:
        return RunBound(run.info.run_id, uri)
    experiment_id, experiment_name = getattr(fluent, "_active_experiment_id", None), None
    if not experiment_id:
        experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or None
        experiment_id = None if experiment_name else os.environ.get("MLFLOW_EXPERIMENT_ID") or None
    return RunBound(
        run=os.environ.get("MLFLOW_RUN_ID") or None,
        tracking_uri=uri,
        owned=True,
        experiment_id=experiment_id,
        experiment_name=experiment_name,
        run_name=os.environ.get("MLFLOW_RUN_NAME") or None,
    )


def absolute_uri(uri: str) -> str:
    """The tracking URI as it reads from any directory: paths of local stores are made absolute."""
    if (database := _SQLITE.fullmatch(uri)) is not None:
        path = database["path"]
        if path == ":memory:" or path.startswith("file:"):
            return uri
        return f"{database['scheme']}{os.path.abspath(path)}{database['options']}"
    if uri.startswith("file:"):
        path = uri.removeprefix("file:")
        return uri if path.startswith("/") else Path(path or "mlruns").absolute().as_uri()
    if uri in ("databricks", "databricks-uc", "uc") or re.match(r"[A-Za-z][\w+.-]*:", uri):
        return uri
    return os.path.abspath(uri or "mlruns")


def active_run_metrics(run_id: str) -> set[str] | None:
    """Names of the metrics that an active run had when the script started it; None if it is not active.

    Asks no server.
    """
    for stack in _active_runs().values():
        for run in stack:
            if run.info.run_id == run_id:
                return set(run.data.metrics)
    return None


def forget_active_run(run_id: str) -> None:
    """Take a run that has ended off every thread's stack: at exit MLflow would end it again, as FINISHED."""
    for stack in _active_runs().values():
        stack[:] = [run for run in stack if run.info.run_id != run_id]


def _active_runs() -> Mapping[int | None, list[Any]]:
    """MLflow's stack of active runs of every thread."""
    from mlflow.tracking import fluent

    stacks = getattr(getattr(fluent, "_active_run_stack", None), "get_all_thread_values", None)
    return stacks() if stacks is not None else {}
