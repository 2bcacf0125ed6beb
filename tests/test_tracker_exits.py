"""How a run ends whose tracker was never closed by its script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Stored
from tests.servers import mlflow_server

SCRIPT = """
import sys
import mlflow_tokens
{begin}
tracker = mlflow_tokens.Tracker()
for _ in range(23):
    tracker.count(computed=100, valid=70, trained=60)
    tracker.step()
try:
    1 / 0
except ZeroDivisionError:
    pass
{end}
"""


def ends(end: str, cwd: Path, *, begin: str = "", **options: object) -> int:
    script = [sys.executable, "-c", SCRIPT.format(begin=begin, end=end)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(script, cwd=cwd, env=environ, check=False, **options).returncode  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("end", "exit_status", "status"),
    [
        pytest.param("", 0, "FINISHED", id="returns"),
        pytest.param("raise RuntimeError('out of memory')", 1, "FAILED", id="raises"),
        pytest.param("raise KeyboardInterrupt", -signal.SIGINT, "KILLED", id="Ctrl-C"),
    ],
)
def test_an_open_tracker_ends_its_run_as_the_script_ended(
    stored: Stored, tmp_path: Path, end: str, exit_status: int, status: str
) -> None:
    assert ends(end, tmp_path, stderr=subprocess.DEVNULL) == exit_status
    run = stored.only_run()
    assert run.info.status == status
    assert run.data.metrics["tokens/computed"] == 2300


def test_an_output_that_cannot_be_written_leaves_no_run_running(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow prints the run's address before it ends the run; a full disk has no room for it."""
    with mlflow_server(store, tmp_path) as address, open("/dev/full", "w") as full:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        monkeypatch.setenv("PYTHONUNBUFFERED", "1")
        for begin in ("", "import mlflow; mlflow.start_run()"):
            ends("raise RuntimeError", tmp_path, begin=begin, stdout=full, stderr=subprocess.DEVNULL)
        ended = [(run.info.status, run.data.metrics["tokens/computed"]) for run in Stored(address).runs()]
    assert ended == [("FAILED", 2300), ("FAILED", 2300)]
