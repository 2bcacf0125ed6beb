"""`mlflow-tokens ui`: the page in a process of its own, over a store and over a server."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlflow_tokens.cli import main
from tests.conftest import Stored
from tests.servers import mlflow_server
from tests.stored_runs import RUNS, store_runs

RANKED = ["packed", "grouped", "padded"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def page(*arguments: str, environ: Mapping[str, str] | None = None) -> Iterator[str]:
    """The address of the page, once the command has said it."""
    command = [sys.executable, "-m", "mlflow_tokens.cli", "ui", "--port", str(free_port()), *arguments]
    # What a shell starts in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environ or {})}
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            match = re.search(r"http://\S+/tokens/", said)
            assert match is not None, said
            yield match.group(0)
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


def runs_at(address: str) -> list[str]:
    with urllib.request.urlopen(f"{address}api/v1/runs?by=effective", timeout=60) as response:
        names: list[str] = json.load(response)["columns"]["run_name"]
    return names


def test_over_a_database_and_over_a_server_of_another_app(stored: Stored, tmp_path: Path) -> None:
    store_runs(stored.uri, RUNS[:3])
    with page("--tracking-uri", stored.uri) as address:
        assert runs_at(address) == RANKED
        with urllib.request.urlopen(address.removesuffix("tokens/"), timeout=60) as response:
            assert response.url == address
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    with mlflow_server(stored.uri, tmp_path, app=None) as server:
        with page(environ={"MLFLOW_TRACKING_URI": server}) as address:
            assert runs_at(address) == RANKED
        # The names of runs lead to it.
        with (
            page("--tracking-uri", server) as address,
            urllib.request.urlopen(f"{address}_dash-layout", timeout=60) as response,
        ):
            setup = json.load(response)["props"]["children"][0]["props"]["data"]
        assert setup["run_link"] == f"{server}/#/experiments/{{experiment_id}}/runs/{{run_id}}"


def test_another_name_gets_nothing(stored: Stored) -> None:
    with page("--tracking-uri", stored.uri, "--allowed-hosts", "node7") as address:
        host = address.split("/")[2]
        for name, status in (("evil.example", 403), ("node7", 200), ("node7:80", 200), ("localhost", 200)):
            connection = http.client.HTTPConnection(host, timeout=60)
            connection.request("GET", "/tokens/api/v1/experiments", headers={"Host": name})
            assert connection.getresponse().status == status, name
            connection.close()


def test_an_address_that_is_taken_and_one_that_is_none(
    stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["ui", "--tracking-uri", stored.uri, "--port", port]) == 2
    assert f"127.0.0.1:{port} cannot be used" in capsys.readouterr().err
    assert main(["ui", "--tracking-uri", stored.uri, "--port", "99999"]) == 2
    assert main(["ui", "--tracking-uri", stored.uri, "--host", "203.0.113.1"]) == 2


def test_a_store_that_does_not_answer_is_said_by_the_page(tmp_path: Path) -> None:
    with page("--tracking-uri", "http://127.0.0.1:9") as address:
        with pytest.raises(urllib.error.HTTPError) as refused:
            runs_at(address)
        assert refused.value.code == 502
        assert "does not answer" in refused.value.read().decode()
