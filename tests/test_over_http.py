"""A real job into a real `mlflow server` over HTTP, read back by the page's API and by the command."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from mlflow_tokens.cli import main
from tests.jobs import launch
from tests.servers import mlflow_server


def test_page_and_command_show_what_a_job_over_http_has_logged(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mlflow_server(store, tmp_path) as address:
        done = launch(2, "--price=2 CNY/device-hour", cwd=tmp_path, MLFLOW_TRACKING_URI=address)
        assert done.status == 0, done.output
        with urllib.request.urlopen(f"{address}/tokens/api/v1/runs?by=valid", timeout=60) as response:
            columns = json.load(response)["columns"]
        assert main(["compare", "--tracking-uri", address, "--by", "valid", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    for kind in ("computed", "valid", "trained"):
        assert columns[f"tokens_{kind}"] == [done.recount[kind]] == [run[f"tokens_{kind}"]]
    assert columns["status"] == ["FINISHED"]
    assert run["cost_total"] == pytest.approx(run["device_hours"] * 2, rel=1e-9)
    assert columns["cost_per_million"][0] == pytest.approx(
        run["cost_total"] / done.recount["valid"] * 1e6, rel=1e-9
    )
