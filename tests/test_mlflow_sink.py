"""Which run the MLflow sink writes to, how that run ends, and how long a server can keep it waiting."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.utils import rest_utils

from mlflow_tokens.metrics import METRICS
from mlflow_tokens.records import RunBound
from mlflow_tokens.sinks import transport
from mlflow_tokens.sinks.active_run import absolute_uri, active_binding
from mlflow_tokens.sinks.base import is_our_thread
from mlflow_tokens.sinks.mlflow import MlflowSink, is_ours
from mlflow_tokens.snapshot import Snapshot
from tests.conftest import Stored
from tests.servers import relay
from tests.threads import on_writer

T0 = 1_790_000_000_000
SEGMENT = "5e9" * 10


def snapshot(at: int, metrics: Mapping[str, float]) -> Snapshot:
    return Snapshot("step", at, at, at, T0 + at, metrics, {})


COST = [snapshot(10, {"cost/total": 2.0})]


def sink_for(bound: RunBound, *, live: bool = True, started_at: float | None = None) -> MlflowSink:
    return MlflowSink(bound, {}, lambda _: None, segment=SEGMENT, live=live, started_at=started_at)


@pytest.mark.parametrize(
    ("uri", "absolute"),
    [
        ("sqlite:///a.db", "sqlite:////work/a.db"),
        ("sqlite:///../a.db?timeout=3", "sqlite:////a.db?timeout=3"),
        ("sqlite+pysqlite:////x/a.db", "sqlite+pysqlite:////x/a.db"),
        ("sqlite:///:memory:", "sqlite:///:memory:"),
        ("sqlite://", "sqlite://"),
        ("./mlruns", "/work/mlruns"),
        ("runs", "/work/runs"),
        ("", "/work/mlruns"),
        ("/x/mlruns", "/x/mlruns"),
        ("file:runs", "file:///work/runs"),
        ("file:///x/runs", "file:///x/runs"),
        ("http://host:5000/ml", "http://host:5000/ml"),
        ("postgresql+psycopg2://u:p@host/db", "postgresql+psycopg2://u:p@host/db"),
        ("databricks", "databricks"),
        ("databricks://profile", "databricks://profile"),
    ],
)
def test_the_uri_of_a_local_store_is_absolute(
    uri: str, absolute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/work")
    assert absolute_uri(uri) == absolute


def test_our_metrics_are_known_by_their_names() -> None:
    assert all(
        is_ours(spec.name.replace("<phase>", "train")) for spec in METRICS if "source" not in spec.name
    )
    assert is_ours("cost/waste/padding") and is_ours("tokens/source/wiki")
    assert not is_ours("loss") and not is_ours("tokens/of/mine") and not is_ours("cost/phase")


def test_the_binding_is_the_active_run(stored: Stored) -> None:
    with mlflow.start_run() as run:
        assert active_binding() == RunBound(run.info.run_id, stored.uri, owned=False)


def test_the_binding_knows_where_a_run_is_to_be_started_and_asks_no_server(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLFLOW_RUN_ID", "MLFLOW_RUN_NAME", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        mlflow.set_tracking_uri(uri)
        assert active_binding() == RunBound(None, uri, owned=True)
        monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "7")
        monkeypatch.setenv("MLFLOW_RUN_NAME", "tiny")
        assert active_binding() == RunBound(None, uri, True, experiment_id="7", run_name="tiny")
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "gpt")
        monkeypatch.setenv("MLFLOW_RUN_ID", "f" * 32)
        assert active_binding() == RunBound("f" * 32, uri, True, experiment_name="gpt", run_name="tiny")
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_the_experiment_that_the_script_has_set(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow.tracking.fluent, "_active_experiment_id", None)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "0")
    experiment = mlflow.set_experiment("gpt").experiment_id
    bound = active_binding()
    assert bound == RunBound(None, stored.uri, True, experiment_id=experiment)
    on_writer(lambda: sink_for(bound).write(COST))
    assert stored.only_run().info.experiment_id == experiment


def test_a_run_that_mlflow_would_resume_is_resumed(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = stored.client.create_run("0").info.run_id
    stored.client.set_terminated(run_id, "FAILED")
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    bound = active_binding()

    def work() -> None:
        sink = sink_for(bound)
        assert sink.run_id == run_id and sink.started_run(0.0) is None
        sink.write(COST)
        assert sink.started_run(0.0) == run_id and stored.only_run().info.status == "RUNNING"
        # The script can still resume it.
        assert os.environ["MLFLOW_RUN_ID"] == run_id
        sink.close("FINISHED")

    on_writer(work)
    assert stored.only_run().info.status == "FINISHED" and stored.points("cost/total") == [(10, 2.0)]


def test_the_run_is_started_where_the_script_was_bound(stored: Stored, tmp_path: Path) -> None:
    bound = active_binding()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/another.db")

    def work() -> None:
        sink = sink_for(bound)
        sink.write(COST)
        sink.close("FINISHED")

    on_writer(work)
    run = stored.only_run()
    assert run.info.status == "FINISHED" and {"mlflow.user", "mlflow.source.name"} <= run.data.tags.keys()
    assert not (tmp_path / "another.db").exists()


def test_what_is_there_already_asks_for_nothing(tmp_path: Path) -> None:
    sink = sink_for(RunBound(None, f"sqlite:///{tmp_path}/new.db", owned=True))
    sink.write(COST, skip={("cost/total", 10, T0 + 10)})
    sink.close("FINISHED")
    assert sink.run_id is None and list(tmp_path.iterdir()) == []


def test_a_run_of_which_no_number_is_known_has_its_tags(stored: Stored) -> None:
    sink = sink_for(RunBound(None, stored.uri, owned=True), live=False)
    sink.write([snapshot(10, {})])
    assert stored.only_run().data.metrics == {}
    assert "mlflow_tokens.segment" in stored.only_run().data.tags


def test_it_is_written_before_the_call_returns(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_LOGGING", "true")
    sink = sink_for(RunBound(None, stored.uri, owned=True), live=False)
    sink.write(COST)
    assert stored.points("cost/total") == [(10, 2.0)]
    stored.client.delete_run(sink.run_id)
    with pytest.raises(MlflowException):
        sink.write([snapshot(20, {"cost/total": 4.0})])


def test_a_replay_starts_the_run_that_the_job_could_not(stored: Stored) -> None:
    ids: list[str] = []
    bound = RunBound(None, stored.uri, owned=True, experiment_name="new", run_name="tiny")
    state = random.getstate()
    sink = MlflowSink(
        bound,
        {"mlflow_tokens.schema": "1"},
        ids.append,
        segment=SEGMENT,
        started_at=1_789_999_000.25,
        live=False,
    )
    assert (sink.stored(), sink.tags(), sink.at(T0 + 10), stored.runs()) == (set(), {}, {}, [])
    sink.write(COST)
    assert sink.latest() == {}  # nothing but what it has written
    sink.close("KILLED", end_time=1_790_000_100.5)
    sink.close("FINISHED", end_time=1_790_000_200.0)
    run = stored.only_run()
    assert ids == [run.info.run_id] and mlflow.active_run() is None
    assert stored.client.get_experiment(run.info.experiment_id).name == "new"
    assert (run.info.start_time, run.info.end_time) == (1_789_999_000_250, 1_790_000_100_500)
    assert (run.info.status, run.info.run_name) == ("KILLED", "tiny")
    assert not is_our_thread() and random.getstate() == state


def test_a_replay_without_a_name_draws_none_of_the_scripts_random_numbers(stored: Stored) -> None:
    state = random.getstate()
    sink_for(RunBound(None, stored.uri, owned=True), live=False).write(COST)
    assert stored.only_run().info.run_name and random.getstate() == state


def test_a_replay_finds_the_run_of_the_job_and_ends_it(stored: Stored) -> None:
    on_writer(lambda: sink_for(RunBound(None, stored.uri, owned=True)).write(COST))
    sink = sink_for(RunBound(None, stored.uri, owned=True), live=False)
    assert sink.stored() == {("cost/total", 10, T0 + 10)}
    assert sink.latest() == {"cost/total": (2.0, 10, T0 + 10)}
    sink.write(COST, skip=sink.stored())
    sink.close("KILLED", end_time=1_790_000_100.0)
    run = stored.only_run()
    assert (run.info.status, run.info.end_time) == ("KILLED", 1_790_000_100_000)


@pytest.mark.parametrize("live", [True, False])
def test_a_run_of_the_scripts_is_the_scripts_to_end(stored: Stored, live: bool) -> None:
    run_id = stored.client.create_run("0").info.run_id

    def work() -> None:
        sink = sink_for(RunBound(run_id, stored.uri), live=live)
        sink.write(COST)
        assert sink.started_run(0.0) is None
        sink.close("FINISHED")
        assert stored.only_run().info.status == "RUNNING"
        sink.end_script_run = True
        sink.close("FAILED")
        assert stored.only_run().info.status == "FAILED"
        sink_for_another = sink_for(RunBound(run_id, stored.uri), live=live)
        sink_for_another.end_script_run = True
        sink_for_another.close("KILLED")  # it has ended already

    on_writer(work)
    assert stored.only_run().info.status == "FAILED"


DYING = """
import sys, threading
import mlflow
from mlflow_tokens.sinks.active_run import active_binding
from mlflow_tokens.sinks.mlflow import MlflowSink
run = mlflow.start_run()
sink = MlflowSink(active_binding(), {}, lambda _: None, segment="s")
sink.end_script_run = True
thread = threading.Thread(target=sink.close, args=("FAILED",))
thread.start()
thread.join()
raise RuntimeError("out of memory")
"""


def test_mlflows_exit_handler_does_not_call_a_failed_run_finished(stored: Stored, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DYING], cwd=tmp_path, check=False, capture_output=True)
    assert done.returncode == 1 and b"out of memory" in done.stderr
    assert stored.only_run().info.status == "FAILED"


# ---- servers that fail ------------------------------------------------------------------------------


def test_a_server_that_never_answers_is_asked_once(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        # The kernel takes the connection and the request; nobody answers.
        sink = sink_for(RunBound("f" * 32, f"http://127.0.0.1:{server.getsockname()[1]}"))
        began = time.monotonic()
        with pytest.raises(MlflowException, match="timed out"):
            on_writer(lambda: sink.write(COST))
        assert time.monotonic() - began < 60  # MLflow's own is 120 s
        server.setblocking(False)
        server.accept()[0].close()
        with pytest.raises(BlockingIOError):
            server.accept()


def test_the_time_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT", raising=False)
    assert [transport._seconds(given) for given in (120, None, 3)] == [10.0, 10.0, 3]
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    assert transport._seconds(60) == 60


def test_a_server_that_is_away_is_said_at_once(store: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
    mlflow.set_tracking_uri(uri)
    for bound in (RunBound("f" * 32, uri), RunBound(None, uri, owned=True)):
        for live in (True, False):
            with pytest.raises(MlflowException, match="refused"):
                on_writer(lambda b=bound, x=live: sink_for(b, live=x).write(COST))  # type: ignore[misc]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_once_and_not_waited_for(store: str, status: int) -> None:
    with relay() as busy:
        busy.answer = (
            status,
            {"Retry-After": "3600"},
            b'{"error_code": "INTERNAL_ERROR", "message": "busy!"}',
        )
        sink = sink_for(RunBound("f" * 32, busy.address), live=False)
        with pytest.raises(MlflowException, match="busy!"):
            sink.write(COST)
        with pytest.raises(MlflowException, match="busy!"):
            sink.stored()
        assert busy.count("/runs/log-batch") == 1 and busy.count("/runs/get") == 1


def test_the_scripts_own_requests_are_as_mlflow_makes_them(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
    with relay() as busy:
        busy.answer = (500, {}, b"busy!")
        with pytest.raises(MlflowException, match="busy!"):
            on_writer(lambda: sink_for(RunBound("f" * 32, busy.address)).write(COST))
        with pytest.raises(MlflowException, match="too many 500"):
            MlflowClient(busy.address).log_metric("f" * 32, "loss", 1.0)
        assert (busy.count("/runs/log-batch"), busy.count("/runs/log-metric")) == (1, 3)


def test_this_version_of_mlflow_is_one_whose_requests_we_can_shorten() -> None:
    assert transport.ask_once_on_our_threads()


def test_a_version_of_mlflow_that_works_in_another_way_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def another(session: object, **kwargs: object) -> None:
        pass

    monkeypatch.setattr(rest_utils, "_get_http_response_with_retries", another)
    assert not transport.ask_once_on_our_threads()
    assert rest_utils._get_http_response_with_retries is another
    monkeypatch.delattr(rest_utils, "_get_http_response_with_retries")
    assert not transport.ask_once_on_our_threads()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"http_proxy_original": "http://p:1"}, {"http": "http://p:1"}),
        ({"https_proxy_original": "http://p:1"}, {}),
        ({"http_proxy_original": ""}, {}),
        ({"http_proxy_original": "http://p:1", "http_proxy": "http://q:2"}, {}),
        ({"http_proxy_original": "http://p:1", "HTTP_PROXY": "http://q:2"}, {}),
        ({"http_proxy_original": "http://p:1", "HTTPS_PROXY": "http://q:2"}, {"http": "http://p:1"}),
        ({"http_proxy_original": "http://p:1", "no_proxy": "x,.example.com"}, {}),
        ({"http_proxy_original": "http://p:1", "NO_PROXY": "mlflow.example.com:5000"}, {}),
        ({"http_proxy_original": "http://p:1", "no_proxy": "example.org"}, {"http": "http://p:1"}),
    ],
)
def test_which_proxy_is_put_back(
    environ: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert transport.renamed_proxies("http://mlflow.example.com:5000/api") == expected
