"""Runs read through MLflow's public client: any store or server that `MlflowClient` can reach."""

from __future__ import annotations

import math
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from mlflow_tokens.comparison.reader import Curve, Experiment, MissingError, ReadError, RunRow, named
from mlflow_tokens.comparison.table import TAG_SCHEMA
from mlflow_tokens.comparison.thinning import evenly

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.exceptions import MlflowException

#: Runs or experiments fetched with one call.
_PAGE = 1000
#: Seconds to wait for a server to accept a connection before saying that it does not.
_CONNECT_SECONDS = 5.0
_OURS = f"tags.`{TAG_SCHEMA}` LIKE '%'"
#: A run id may be unknown, or one that no run can have.
_NO_SUCH_RUN = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")

T = TypeVar("T")


class MlflowReader:
    """A `Reader` over MLflow's public client; the default tracking URI where none is given."""

    def __init__(self, tracking_uri: str | None) -> None:
        import mlflow

        self._uri = tracking_uri or mlflow.get_tracking_uri()
        _check_reachable(self._uri)
        _check_exists(self._uri)
        self._client = self._ask(lambda: mlflow.MlflowClient(tracking_uri=self._uri))

    def experiments(self) -> list[Experiment]:
        """Every active experiment, by name."""
        found = self._pages(
            lambda token: self._client.search_experiments(max_results=_PAGE, page_token=token)
        )
        return sorted((Experiment(e.experiment_id, e.name) for e in found), key=lambda e: e.name)

    def runs(self, experiments: Sequence[str] | None = None) -> list[RunRow]:
        """Runs that mlflow_tokens logged to, of the experiments with these names (all when None).

        Raises:
            MissingError: no experiment has one of these names.
            ReadError: the store cannot be reached.
        """
        names = {e.experiment_id: e.name for e in named(self.experiments(), experiments)}
        if not names:
            return []
        found = self._pages(
            lambda token: self._client.search_runs(
                list(names),
                filter_string=_OURS,
                max_results=_PAGE,
                page_token=token,
            )
        )
        return [_row(run, names[run.info.experiment_id]) for run in found]

    def curves(self, run_ids: Sequence[str], metric: str, max_points: int = 1000) -> list[Curve]:
        """One curve a run that has the metric, thinned evenly to `max_points`, ends kept.

        Raises:
            MissingError: no such run, or no metric can have this name.
            ReadError: the store cannot be reached.
        """
        curves = (self._curve(run_id, metric, max_points) for run_id in run_ids)
        return [curve for curve in curves if curve.steps]

    def experiment_of(self, run_id: str) -> str:
        """The id of the experiment that a run is in.

        Raises:
            MissingError: no such run.
            ReadError: the store cannot be reached.
        """
        return str(self._ask(lambda: self._client.get_run(run_id), _NO_SUCH_RUN).info.experiment_id)

    def _curve(self, run_id: str, metric: str, max_points: int) -> Curve:
        history = self._ask(lambda: self._client.get_metric_history(run_id, metric), _NO_SUCH_RUN)
        if not history:  # a SQL store says the same of a run that does not exist
            self._ask(lambda: self._client.get_run(run_id), _NO_SUCH_RUN)
        history = sorted(history, key=lambda point: (point.timestamp, point.step))
        kept = [history[place] for place in evenly(len(history), max_points)]
        return Curve(
            run_id=run_id,
            metric=metric,
            steps=tuple(point.step for point in kept),
            timestamps_ms=tuple(point.timestamp for point in kept),
            values=tuple(_unclamped(point.value) for point in kept),
        )

    def _pages(self, fetch: Callable[[str | None], Any]) -> Iterator[Any]:
        token: str | None = None
        while True:
            page = self._ask(lambda token=token: fetch(token))  # type: ignore[misc]
            yield from page
            token = page.token
            if not token:
                return

    def _ask(self, call: Callable[[], T], missing: Sequence[str] = ()) -> T:
        """Call MLflow; what it raises comes out as a `ReadError` that says what to do.

        `missing` are MLflow's codes of errors which say that it has no such thing.
        """
        from mlflow.exceptions import MlflowException

        try:
            return call()
        except OSError as error:
            raise ReadError(f"{without_password(self._uri)} could not be read: {error}") from error
        except MlflowException as error:
            if error.error_code in missing:
                raise MissingError(_first_line(error)) from error
            raise ReadError(
                f"{without_password(self._uri)} could not be read: {_first_line(error)}. "
                "Check the tracking URI, and that the server runs and lets you read."
            ) from error


def without_password(uri: str) -> str:
    """The URI as it may be shown: a password in it becomes ***."""
    password = urlsplit(uri).password
    return uri.replace(f":{password}@", ":***@", 1) if password else uri


def _check_reachable(uri: str) -> None:
    """Say at once that a server does not answer: MLflow's client would retry for minutes."""
    parts = urlsplit(uri)
    proxied = parts.scheme in urllib.request.getproxies()
    if parts.scheme not in ("http", "https") or not parts.hostname or proxied:
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ReadError(
            f"no server answers at {without_password(uri)} ({error}). Start it, or give another tracking URI."
        ) from error


def _check_exists(uri: str) -> None:
    """MLflow would make the database of a mistyped path, and find no run in it."""
    path = uri.removeprefix("sqlite:///").partition("?")[0]
    if path != uri and path and not Path(path).is_file():
        raise ReadError(f"there is no database at {path}; give the tracking URI that the runs were logged to")


def _row(run: Run, experiment_name: str) -> RunRow:
    info, data = run.info, run.data
    return RunRow(
        run_id=info.run_id,
        run_name=info.run_name or info.run_id,
        experiment_id=info.experiment_id,
        experiment_name=experiment_name,
        status=info.status,
        user=data.tags.get("mlflow.user") or info.user_id or "",
        start_time_ms=info.start_time,
        end_time_ms=info.end_time,
        metrics={name: _unclamped(value) for name, value in data.metrics.items()},
        tags=dict(data.tags),
        params=dict(data.params),
    )


def _unclamped(value: float) -> float:
    """MLflow's SQL store keeps ±infinity as ±the largest double; here it is infinity again."""
    return math.copysign(math.inf, value) if abs(value) >= sys.float_info.max else value


def _first_line(error: MlflowException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].removesuffix(".") if lines else type(error).__name__
