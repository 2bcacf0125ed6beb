"""Snapshots into one MLflow run, bound to its id and not to a thread's active run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

from mlflow_tokens.metrics import METRICS
from mlflow_tokens.records import RunBound
from mlflow_tokens.run_report import RunReport
from mlflow_tokens.sinks.active_run import absolute_uri, forget_active_run
from mlflow_tokens.sinks.base import EXIT_TIMEOUT_LOCAL, EXIT_TIMEOUT_REMOTE
from mlflow_tokens.sinks.randomness import is_served
from mlflow_tokens.sinks.transport import our_work
from mlflow_tokens.snapshot import Point, Snapshot
from mlflow_tokens.statement_text import TITLE, to_html, to_json, to_markdown

#: By this tag a run that we started is found again when its id never reached us.
SEGMENT_TAG = "mlflow_tokens.segment"
TAG_PREFIX = "mlflow_tokens."
#: Where our artifacts lie among the run's.
ARTIFACTS = "mlflow_tokens"

#: What MLflow takes a request: metrics and tags together, and tags.
MAX_ENTITIES, MAX_TAGS = 1000, 100

#: What MLflow shows as the description of a run, and how ours begins.
NOTE_TAG = "mlflow.note.content"
_NOTE_HEAD = f"### {TITLE}"

_NO_LINK = "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"
_NAMES = frozenset(spec.name for spec in METRICS if "<" not in spec.name)
_FAMILIES = tuple(spec.name.partition("<")[0] for spec in METRICS if "<" in spec.name)


def is_ours(metric: str) -> bool:
    """Whether this package logs a metric of this name."""
    return metric in _NAMES or metric.startswith(_FAMILIES)


class MlflowSink:
    """Writes with `log_batch`, as many points a request as MLflow takes, with each snapshot's own time.

    A repeated request is harmless in a database, which drops exact repeats of (name, time, step, value); a
    file store keeps them, so that the points that are `stored` are to be skipped.

    Nothing here waits for long: a request is made once, and whoever calls tries again. What MLflow raises
    (MlflowException, mostly) is let out, whether trying again can mend it (a server that is away) or not (a
    run that was deleted, a password that is wrong).

    Args:
        bound: the run, or where to start one.
        tags: of the run, written with the first points.
        on_run: told the run's id when it is known, before anything is written.
        segment: names the process whose numbers these are, and the run if it starts one.
        started_at: when the run began, in s since the epoch; for a run that is started later than that.
        live: the process that trains. Otherwise its journal is replayed: then MLflow's active run is left
            alone, and a run that has ended keeps its status.
        may_exist: an earlier process may have started the run and not have heard so before it died.
    """

    name = "MLflow"
    in_order = False

    def __init__(
        self,
        bound: RunBound,
        tags: Mapping[str, str],
        on_run: Callable[[str], None],
        *,
        segment: str,
        started_at: float | None = None,
        live: bool = True,
        may_exist: bool = False,
    ) -> None:
        self._bound = bound
        self._tags = dict(tags)
        self._on_run = on_run
        self._segment = segment
        self._started_at = started_at
        self._live = live
        self._owned = bound.owned or bound.run is None
        self.exit_timeout = EXIT_TIMEOUT_REMOTE if is_served(bound.tracking_uri) else EXIT_TIMEOUT_LOCAL
        self.end_script_run = False
        """Whether `close` ends a run of the script's too: the process is dying, and the script cannot."""
        self._run_id: str | None = None
        self._run_known = threading.Event()
        self._tried_to_start = may_exist
        self._started_empty = False
        self._tagged = False
        self._ended = False
        self._unread: list[str] | None = None
        self._read: set[Point] = set()

    @property
    def run_id(self) -> str | None:
        """The run that is written to; None if it has not been started."""
        return self._run_id or self._bound.run

    def started_run(self, timeout: float) -> str | None:
        """The id of the run that this sink started, waited for `timeout` s; None if it started none."""
        return self._run_id if self._owned and self._run_known.wait(timeout) else None

    def bind(self) -> str:
        """Find or start the run now, and give its id. May raise."""
        with self._client() as client:
            return self._run_id or self._bind(client)

    def write(self, snapshots: Sequence[Snapshot], skip: AbstractSet[Point] = frozenset()) -> None:
        """Write the points that are not in `skip`, and with the first of them the tags. May raise."""
        points = {
            point: value for snapshot in snapshots for point, value in snapshot.points() if point not in skip
        }
        if not points and (self._tagged or skip):
            return
        self._unread, self._read = None, set()
        with self._client() as client:
            from mlflow.entities import Metric, RunTag

            run_id = self._run_id or self._bind(client)
            metrics = iter([Metric(name, v, time, step) for (name, step, time), v in points.items()])
            tags = iter([] if self._tagged else [RunTag(key, value) for key, value in self._tags.items()])
            while True:
                some_tags = list(islice(tags, MAX_TAGS))
                some_metrics = list(islice(metrics, MAX_ENTITIES - len(some_tags)))
                if not some_tags and not some_metrics:
                    break
                # MLFLOW_ENABLE_ASYNC_LOGGING would have it return before anything is written, and lose it
                # where that fails.
                client.log_batch(run_id, metrics=some_metrics, tags=some_tags, synchronous=True)
            self._tagged = True

    def stored(self) -> set[Point]:
        """Every point of our metrics that the run has. May raise.

        It takes a request a metric: after one that failed it goes on from there, so that a server that
        fails now and then is read through in the end.
        """
        with self._client() as client:
            run_id = self._existing_run(client)
            if self._unread is None:
                self._unread = [metric.key for metric in self._latest(client, run_id)]
            while self._unread:
                history = client.get_metric_history(run_id, self._unread[-1])
                self._read.update((m.key, m.step, m.timestamp) for m in history)
                self._unread.pop()
        points = self._read
        self._unread, self._read = None, set()
        return points

    def at(self, timestamp_ms: int) -> dict[str, float]:
        """The values of our metrics at one time, which no two snapshots of a run share. May raise."""
        with self._client() as client:
            run_id = self._existing_run(client)
            return {
                m.key: m.value
                for latest in self._latest(client, run_id)
                for m in client.get_metric_history(run_id, latest.key)
                if m.timestamp == timestamp_ms
            }

    def latest(self, but: AbstractSet[int] = frozenset()) -> dict[str, tuple[float, int, int]]:
        """Value, step and time in ms of what MLflow takes for the latest point of each of our metrics.

        Empty for a run that this sink has started from nothing. May raise.

        but: times in ms of which no point counts.
        """
        if self._started_empty:
            return {}
        found: dict[str, tuple[float, int, int]] = {}
        with self._client() as client:
            run_id = self._existing_run(client)
            for newest in self._latest(client, run_id):
                points = [newest] if newest.timestamp not in but else []
                points = points or client.get_metric_history(run_id, newest.key)
                counting = [(m.step, m.timestamp, m.value) for m in points if m.timestamp not in but]
                if counting:
                    step, time, value = max(counting)
                    found[newest.key] = value, step, time
        return found

    def tags(self) -> dict[str, str]:
        """The run's tags under `mlflow_tokens.`. May raise."""
        with self._client() as client:
            run_id = self._existing_run(client)
            tags = client.get_run(run_id).data.tags if run_id is not None else {}
        return {key: value for key, value in tags.items() if key.startswith(TAG_PREFIX)}

    def attach(self, report: RunReport) -> None:
        """Log the report among the run's artifacts, and the statement as its note. May raise.

        A note that somebody else has written stays.
        """
        with self._client() as client:
            run_id = self._existing_run(client)
            if run_id is not None:
                note = client.get_run(run_id).data.tags.get(NOTE_TAG, "")
                if not note or note.startswith(_NOTE_HEAD):
                    client.set_tag(run_id, NOTE_TAG, f"{_NOTE_HEAD}\n\n{to_markdown(report.statement)}")
                for name, text in (
                    ("statement.html", to_html(report.statement)),
                    ("statement.json", to_json(report.statement)),
                    ("tokens.html", report.tokens.to_html()),
                    ("tokens.json", report.tokens.to_json()),
                ):
                    client.log_text(run_id, text, f"{ARTIFACTS}/{name}")

    def close(self, status: str, end_time: float | None = None) -> None:
        """End the run with `status`, if this sink started it or if `end_script_run`. May raise.

        end_time: in s since the epoch; by default now. A run of the script's, and one whose journal is
        replayed, is ended only if it is RUNNING.
        """
        if self._ended or not (self._owned or self.end_script_run):
            return
        if self._live and self._owned and not self._tried_to_start:
            return
        with self._client() as client:
            run_id = self._existing_run(client)
            if run_id is None:
                return
            if self._live and self._owned:
                self._end(client, run_id, status, end_time)
            else:
                if client.get_run(run_id).info.status == "RUNNING":
                    _set_terminated(client, run_id, status, end_time)
                if self._live:
                    forget_active_run(run_id)
        self._ended = True

    @contextmanager
    def _client(self) -> Iterator[Any]:
        with our_work(self._bound.tracking_uri):
            from mlflow import MlflowClient

            yield MlflowClient(self._bound.tracking_uri)

    # ---- the run ----------------------------------------------------------------------------------

    def _bind(self, client: Any) -> str:
        run_id = self._start(client) if self._owned else self._bound.run
        assert run_id is not None
        self._run_id = run_id
        self._run_known.set()
        self._on_run(run_id)
        return run_id

    def _start(self, client: Any) -> str:
        """Start or resume the run; one that an earlier attempt has started, whose answer was lost, is it."""
        existing = self._existing_run(client)
        self._tried_to_start = True
        if not self._is_fluent():
            if existing is not None and self._live:
                client.update_run(existing, status="RUNNING")
            return existing or self._create(client)
        import mlflow

        # On this thread only: MLflow's stack of active runs is a thread's own, so the script's
        # later start_run() does not find one in its way. start_run() gives the run its
        # user and git commit.
        if existing is not None:
            return str(mlflow.start_run(run_id=existing).info.run_id)
        run = mlflow.start_run(
            run_name=self._bound.run_name,
            experiment_id=self._experiment(client, create=True),
            tags={SEGMENT_TAG: self._segment},
        )
        self._started_empty = True
        return str(run.info.run_id)

    def _create(self, client: Any) -> str:
        from mlflow.tracking.context import registry

        tags = {SEGMENT_TAG: self._segment}
        run = client.create_run(
            experiment_id=self._experiment(client, create=True),
            start_time=_milliseconds(self._started_at),
            # A replay may run elsewhere, and as somebody else.
            tags=registry.resolve_tags(tags) if self._live else tags,
            run_name=self._bound.run_name,
        )
        self._started_empty = True
        return str(run.info.run_id)

    def _existing_run(self, client: Any) -> str | None:
        """The run if there is one. It is looked for where there may be one whose id never reached us."""
        if self.run_id is not None:
            return self.run_id
        if self._live and not self._tried_to_start:
            return None
        experiment = self._experiment(client, create=False)
        if experiment is None:
            return None
        runs = client.search_runs(
            [experiment],
            filter_string=f"tags.`{SEGMENT_TAG}` = '{self._segment}'",
            # One that was deleted since is not to come back as another.
            run_view_type=_all_runs(),
            max_results=1,
            order_by=["attributes.start_time ASC"],
        )
        return str(runs[0].info.run_id) if runs else None

    def _experiment(self, client: Any, *, create: bool) -> str | None:
        if self._bound.experiment_id is not None:
            return self._bound.experiment_id
        if self._bound.experiment_name is not None:
            experiment = client.get_experiment_by_name(self._bound.experiment_name)
            if experiment is not None:
                return str(experiment.experiment_id)
            return str(client.create_experiment(self._bound.experiment_name)) if create else None
        from mlflow.tracking import fluent

        # The default of a notebook service is not "0".
        default = getattr(fluent, "_get_experiment_id", None) if self._is_fluent() else None
        return (default() if default is not None else None) or "0"

    def _is_fluent(self) -> bool:
        """Whether mlflow.start_run() and its like mean the store that the run is bound to."""
        import mlflow

        return self._live and absolute_uri(mlflow.get_tracking_uri()) == self._bound.tracking_uri

    def _end(self, client: Any, run_id: str, status: str, end_time: float | None) -> None:
        import mlflow

        active = mlflow.active_run()
        if active is not None and active.info.run_id == run_id and end_time is None and self._is_fluent():
            with suppress(OSError, ValueError):
                mlflow.end_run(status)
                return
        _set_terminated(client, run_id, status, end_time)

    # ---- what the run has -------------------------------------------------------------------------

    def _latest(self, client: Any, run_id: str | None) -> list[Any]:
        if run_id is None:
            return []
        return [metric for metric in client.get_run(run_id).data._metric_objs if is_ours(metric.key)]


def _set_terminated(client: Any, run_id: str, status: str, end_time: float | None) -> None:
    """End a run, also where MLflow cannot print the link to it, which it does first.

    Standard output may be a pipe that nobody reads any more, a full disk, or closed.
    """
    try:
        client.set_terminated(run_id, status, _milliseconds(end_time))
    except (OSError, ValueError):  # MLflow's own are MlflowException
        before = os.environ.get(_NO_LINK)
        os.environ[_NO_LINK] = "true"
        try:
            client.set_terminated(run_id, status, _milliseconds(end_time))
        finally:
            if before is None:
                del os.environ[_NO_LINK]
            else:
                os.environ[_NO_LINK] = before


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


def _all_runs() -> int:
    from mlflow.entities import ViewType

    return int(ViewType.ALL)
