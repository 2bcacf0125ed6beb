"""Shared by all tests: a fresh MLflow store each, and nothing of ours left behind."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

import mlflow_tokens

CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sqlite store with its tables, made once: making them takes seconds."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URI of a fresh store, which MLflow uses during the test."""
    path = tmp_path / "mlflow.db"
    shutil.copy(empty_store, path)
    uri = f"sqlite:///{path}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_TOKENS_JOURNAL_DIR", str(tmp_path / "journal"))
    for name in [name for name in os.environ if name.startswith("PADDLE_")]:
        monkeypatch.delenv(name)
    previous = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    yield uri
    mlflow.end_run()
    mlflow.set_tracking_uri(previous)


@pytest.fixture(autouse=True)
def leave_nothing_behind() -> Iterator[None]:
    """Close the tracker and take out the hooks that a test has left."""
    yield
    if "mlflow_tokens.paddle.autolog" in sys.modules:
        mlflow_tokens.autolog(disable=True)
    tracker = mlflow_tokens.current() if "mlflow_tokens.tracker" in sys.modules else None
    if tracker is not None:
        tracker.close()


class Stored:
    """What is in a store, read with MLflow's own client."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.client = MlflowClient(uri)

    def runs(self) -> list[Run]:
        experiments = [experiment.experiment_id for experiment in self.client.search_experiments()]
        return list(self.client.search_runs(experiments, order_by=["attributes.start_time ASC"]))

    def only_run(self) -> Run:
        (run,) = self.runs()
        return run

    def metrics(self) -> dict[str, float]:
        return dict(self.only_run().data.metrics)

    def points(self, metric: str, run_id: str | None = None) -> list[tuple[int, float]]:
        """(step, value) of every point, in the order of their times."""
        run_id = run_id or self.only_run().info.run_id
        history = self.client.get_metric_history(run_id, metric)
        return [(point.step, point.value) for point in sorted(history, key=lambda p: (p.timestamp, p.step))]


@pytest.fixture
def stored(store: str) -> Stored:
    return Stored(store)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium, headless."""
    playwright_api = pytest.importorskip("playwright.sync_api", reason="pip install 'mlflow-tokens[test]'")
    chromium = shutil.which("chromium")
    if chromium is None:
        line = "no Chromium: apt-get install chromium fonts-noto-cjk"
        if os.environ.get("CI"):
            pytest.fail(line)
        pytest.skip(line)
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGS)
        yield browser
        browser.close()
