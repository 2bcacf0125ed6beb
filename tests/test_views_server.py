"""The page on MLflow's server: where it is mounted, how often, and which kind of app comes out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from flask import Flask

from mlflow_tokens.server import install
from tests.stored_runs import store_runs

CREATE_FOR_EACH = """
import os
import re
from mlflow.server import app
from mlflow_tokens.server import create_app
for server in ("uvicorn", "gunicorn", "waitress"):
    os.environ["_MLFLOW_SGI_NAME"] = server
    print(server, type(create_app()).__name__)
print(sum(rule.rule == "/tokens/" for rule in app.url_map.iter_rules()))
"""


def test_under_the_static_prefix_and_twice(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store_runs(store)
    monkeypatch.setenv("_MLFLOW_STATIC_PREFIX", "/ml/")
    monkeypatch.setenv("_MLFLOW_SERVER_FILE_STORE", store)
    app = Flask(__name__)
    install(app)
    install(app)
    client = app.test_client()
    assert client.get("/ml/tokens/").status_code == 200
    assert "/ml/tokens/assets/page.js" in client.get("/ml/tokens/").text
    setup = client.get("/ml/tokens/_dash-layout").get_json()["props"]["children"][0]["props"]["data"]
    assert setup["api"] == "/ml/tokens/api/v1/"
    assert setup["run_link"] == "/ml/#/experiments/{experiment_id}/runs/{run_id}"
    assert client.get("/ml/tokens/api/v1/runs").get_json()["rows"] == 6
    assert client.get("/tokens/").status_code == 404


def test_each_kind_of_server_gets_its_app(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-c", CREATE_FOR_EACH],
        cwd=tmp_path,
        env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.split() == ["uvicorn", "FastAPI", "gunicorn", "Flask", "waitress", "Flask", "1"]


def test_the_first_requests_of_a_worker_may_come_all_at_once(store: str) -> None:
    """The page may come from one worker of a server, and its scripts, in parallel, from another."""
    page_worker = Flask("one")
    install(page_worker)
    page = page_worker.test_client().get("/tokens/").text
    paths = [path.replace("%40", "@") for path in re.findall(r'(?:src|href)="(/tokens/[^"]+)"', page)]
    assert len(paths) > 10
    for _ in range(5):
        script_worker = Flask("two")
        install(script_worker)
        together = threading.Barrier(len(paths))

        def get(path: str, worker: Flask = script_worker, together: threading.Barrier = together) -> int:
            together.wait()
            return worker.test_client().get(path).status_code

        with ThreadPoolExecutor(len(paths)) as browser:
            assert dict(zip(paths, browser.map(get, paths), strict=True)) == dict.fromkeys(paths, 200)
