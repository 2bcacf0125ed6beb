"""The MLflow sink into every kind of store, and through everything that may stand in between."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from mlflow_tokens.metrics import METRICS
from mlflow_tokens.records import RunBound
from mlflow_tokens.sinks.mlflow import MlflowSink
from mlflow_tokens.snapshot import Snapshot
from tests.servers import Relay, mlflow_server, postgresql, relay, self_signed_certificate
from tests.threads import on_writer

T0 = 1_790_000_000_000
NAN = math.nan
TAGS = {"mlflow_tokens.schema": "1", "mlflow_tokens.currency": "CNY"}
USER = {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": "correct-horse-battery"}

#: (name, step, time in ms, value), as MLflow keeps them: what comes of SNAPSHOTS, by hand.
POINTS = [
    ("cost/per_million_tokens", 20, T0 + 60_001, NAN),
    ("cost/total", 10, T0, 0.1),
    ("cost/total", 20, T0 + 60_001, 0.30000000000000004),
    ("cost/total", 50, T0 + 90_000, 0.25),
    ("tokens/computed", 10, T0, 10_251_184_259.0),
    ("tokens/computed", 20, T0 + 60_001, 9_007_199_254_740_991.0),
]


def snapshot(
    position: int, time_ms: int, metrics: Mapping[str, float], high_water: int | None = None
) -> Snapshot:
    return Snapshot("step", position, position, position, time_ms, metrics, {}, high_water)


SNAPSHOTS = [
    snapshot(10, T0, {"tokens/computed": 10_251_184_259.0, "cost/total": 0.1}),
    snapshot(
        20,
        T0 + 60_001,
        {"tokens/computed": 2.0**53 - 1, "cost/total": 0.1 + 0.2, "cost/per_million_tokens": NAN},
    ),
    # Below the high-water step 50: totals go there.
    snapshot(20, T0 + 90_000, {"cost/total": 0.25}, high_water=50),
]


#: Passwords are checked once: hashing one for every request would take most of the tests' time.
AUTH = """
[mlflow]
default_permission = READ
database_uri = sqlite:///basic_auth.db
auth_cache_ttl_seconds = 3600
"""


@dataclass
class Server:
    """A server with users and a prefix, over PostgreSQL."""

    address: str
    certificate: tuple[Path, Path]

    @property
    def prefix(self) -> str:
        return urlsplit(self.address).path


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "auth.ini").write_text(AUTH)
    environ = {
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"),
        "MLFLOW_AUTH_ADMIN_USERNAME": USER["MLFLOW_TRACKING_USERNAME"],
        "MLFLOW_AUTH_ADMIN_PASSWORD": USER["MLFLOW_TRACKING_PASSWORD"],
        "MLFLOW_FLASK_SERVER_SECRET_KEY": uuid.uuid4().hex,
    }
    with (
        postgresql() as database,
        mlflow_server(database, folder, app="basic-auth", prefix="/ml", environ=environ) as address,
    ):
        yield Server(address, self_signed_certificate(folder))


@dataclass
class Place:
    """Where a sink writes, the same store as MLflow's own client reads it, and what stands in between."""

    uri: str
    truth: str
    between: Relay | None = None


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with ExitStack() as stack:
        between = None
        if request.param == "sqlite":
            truth = uri = request.getfixturevalue("store")
        elif request.param == "files":
            monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
            truth = uri = (tmp_path / "mlruns").as_uri()
        else:
            server: Server = request.getfixturevalue("server")
            for name, value in USER.items():
                monkeypatch.setenv(name, value)
            truth = uri = server.address
            if request.param == "relay":
                between = stack.enter_context(relay(server.address))
                uri = between.address + server.prefix
            elif request.param == "certificate":
                between = stack.enter_context(relay(server.address, server.certificate))
                monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(server.certificate[0]))
                uri = between.address + server.prefix
            elif request.param == "renamed proxy":
                between = stack.enter_context(relay(server.address))
                for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
                    monkeypatch.delenv(name, raising=False)
                monkeypatch.setenv("http_proxy_original", between.address)
                uri = f"http://mlflow.invalid:5000{server.prefix}"
        previous = mlflow.get_tracking_uri()
        mlflow.set_tracking_uri(uri)
        yield Place(uri, truth, between)
        mlflow.set_tracking_uri(previous)


def sink_into(place: Place, segment: str, run: str | None = None, live: bool = True) -> MlflowSink:
    bound = RunBound(run, place.uri, owned=True, experiment_name=f"experiment {segment}", run_name="tiny")
    return MlflowSink(bound, TAGS, lambda _: None, segment=segment, live=live)


def runs_of(place: Place, segment: str) -> list[Run]:
    client = MlflowClient(place.truth)
    experiment = client.get_experiment_by_name(f"experiment {segment}")
    return [] if experiment is None else list(client.search_runs([experiment.experiment_id]))


def points_of(place: Place, run: Run) -> list[tuple[str, int, int, float]]:
    """Every point of the run, sorted."""
    client = MlflowClient(place.truth)
    names = sorted(run.data.metrics)
    history = [point for name in names for point in client.get_metric_history(run.info.run_id, name)]
    return sorted((p.key, p.step, p.timestamp, p.value) for p in history)


EVERYWHERE = ["sqlite", "files", "server", "certificate", "renamed proxy"]


@pytest.mark.parametrize("place", EVERYWHERE, indirect=True)
def test_every_point_is_there_once(place: Place) -> None:
    segment = uuid.uuid4().hex
    ids: list[str] = []

    def first_process() -> None:
        sink = sink_into(place, segment)
        assert sink.stored() == set() and sink.latest() == {} and runs_of(place, segment) == []
        sink.write(SNAPSHOTS[:2])
        ids.append(sink.run_id or "")
        stored = sink.stored()
        assert stored == {point[:3] for point in POINTS if point[2] < T0 + 90_000}
        # A file store keeps exact repeats, everything else drops them.
        sink.write(SNAPSHOTS[:2], skip=stored if place.uri.startswith("file:") else frozenset())
        sink.write(SNAPSHOTS, skip=sink.stored())
        sink.close("FAILED")
        sink.close("FINISHED")  # it has ended already

    def replay() -> None:
        sink = sink_into(place, segment, ids[0], live=False)
        sink.write(SNAPSHOTS, skip=sink.stored())
        assert sink.latest()["cost/total"] == (0.25, 50, T0 + 90_000)
        assert sink.at(T0 + 90_000) == {"cost/total": 0.25}
        assert sink.tags() == {**TAGS, "mlflow_tokens.segment": segment}
        sink.close("FINISHED")  # it has ended already

    on_writer(first_process)
    replay()
    (run,) = runs_of(place, segment)
    assert run.info.run_id == ids[0]
    assert repr(points_of(place, run)) == repr(POINTS)
    assert (run.info.status, run.info.run_name) == ("FAILED", "tiny")
    assert run.data.tags.items() >= {**TAGS, "mlflow_tokens.segment": segment}.items()
    assert {"mlflow.user", "mlflow.source.name"} <= run.data.tags.keys()
    if place.between is not None:
        assert place.between.count("/runs/create") == 1


@pytest.mark.parametrize("place", ["sqlite", "files", "relay"], indirect=True)
def test_more_than_a_request_takes(place: Place) -> None:
    segment = uuid.uuid4().hex
    names = [spec.name for spec in METRICS if "<" not in spec.name][:15]
    snapshots = [
        snapshot(step, T0 + step, {name: step + k / 16 for k, name in enumerate(names)})
        for step in range(1, 134)
    ]
    sink = sink_into(place, segment, live=False)
    sink.write(snapshots)  # 1,995 points and 2 tags: two requests of 1,000 at most
    sink.write(snapshots, skip=sink.stored())
    (run,) = runs_of(place, segment)
    expected = [(name, n, T0 + n, n + k / 16) for n in range(1, 134) for k, name in enumerate(names)]
    assert points_of(place, run) == sorted(expected)
    if place.between is not None:
        assert place.between.count("/runs/log-batch") == 2


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("place", ["relay"], indirect=True)
def test_a_start_whose_answer_is_lost_makes_one_run(place: Place, live: bool) -> None:
    assert place.between is not None
    segment = uuid.uuid4().hex

    def work() -> None:
        sink = sink_into(place, segment, live=live)
        assert place.between is not None
        place.between.lose_answer = "/runs/create"
        with pytest.raises(MlflowException):
            sink.write(SNAPSHOTS)
        assert sink.run_id is None and len(runs_of(place, segment)) == 1
        place.between.lose_answer = "/runs/log-batch"
        with pytest.raises(MlflowException):
            sink.write(SNAPSHOTS)
        sink.write(SNAPSHOTS)
        place.between.lose_answer = "/runs/update"
        with pytest.raises(MlflowException):
            sink.close("KILLED")
        sink.close("KILLED")

    on_writer(work)
    (run,) = runs_of(place, segment)
    assert repr(points_of(place, run)) == repr(POINTS)
    assert run.info.status == "KILLED"
    assert place.between.count("/runs/create") == 1


@pytest.mark.parametrize("place", ["relay"], indirect=True)
def test_a_run_whose_id_never_came_is_ended_all_the_same(place: Place) -> None:
    segment = uuid.uuid4().hex

    def work() -> None:
        sink = sink_into(place, segment)
        assert place.between is not None
        place.between.lose_answer = "/runs/create"
        with pytest.raises(MlflowException):
            sink.write(SNAPSHOTS)
        sink.close("KILLED")

    on_writer(work)
    (run,) = runs_of(place, segment)
    assert (run.info.status, run.data.metrics) == ("KILLED", {})


@pytest.mark.parametrize("place", ["relay"], indirect=True)
def test_a_server_that_fails_every_other_time_is_read_through(place: Place) -> None:
    sink = sink_into(place, uuid.uuid4().hex, live=False)
    sink.write(SNAPSHOTS)
    assert place.between is not None
    before = len(place.between.requests)
    place.between.fails = lambda number: (number - before) % 2 == 1
    failures = 0
    while True:
        try:
            stored = sink.stored()  # the run, and three metrics
            break
        except MlflowException:
            failures += 1
    assert failures == 3 and stored == {point[:3] for point in POINTS}


@pytest.mark.parametrize("place", ["server"], indirect=True)
def test_a_wrong_password_is_said_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong")
    segment = uuid.uuid4().hex
    with pytest.raises(MlflowException, match="401"):
        on_writer(lambda: sink_into(place, segment).write(SNAPSHOTS))


@pytest.mark.parametrize("place", ["certificate"], indirect=True)
def test_a_certificate_that_is_not_trusted_is_said_at_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_SERVER_CERT_PATH")
    with pytest.raises(MlflowException, match="CERTIFICATE_VERIFY_FAILED"):
        on_writer(lambda: sink_into(place, uuid.uuid4().hex).write(SNAPSHOTS))
    assert place.between is not None and place.between.requests == []


@pytest.mark.parametrize("place", ["sqlite", "server"], indirect=True)
def test_what_trying_again_cannot_mend_is_raised(place: Place) -> None:
    segment = uuid.uuid4().hex
    client = MlflowClient(place.truth)
    sink = sink_into(place, segment, live=False)
    sink.write(SNAPSHOTS[:1])
    client.delete_run(sink.run_id)
    with pytest.raises(MlflowException, match="must be in the 'active' state"):
        sink.write(SNAPSHOTS)
    # A run that was deleted does not come back as another one.
    again = sink_into(place, segment, live=False)
    with pytest.raises(MlflowException, match="must be in the 'active' state"):
        again.write(SNAPSHOTS)
    assert runs_of(place, segment) == []
    client.delete_experiment(client.get_experiment_by_name(f"experiment {segment}").experiment_id)
    with pytest.raises(MlflowException):
        sink_into(place, segment, live=False).write(SNAPSHOTS)


@pytest.mark.parametrize("place", ["renamed proxy"], indirect=True)
def test_the_renamed_proxy_is_for_our_threads_alone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert place.between is not None
    sink = sink_into(place, uuid.uuid4().hex)
    on_writer(lambda: sink.write(SNAPSHOTS[:1]))
    seen = len(place.between.requests)
    assert seen > 0 and "http_proxy" not in os.environ
    with pytest.raises(MlflowException, match=r"mlflow\.invalid"):
        MlflowClient(place.uri).get_run(sink.run_id)
    assert len(place.between.requests) == seen
