"""Runs tests/trainers/script.py, with the Trainer that is installed, in processes of its own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import LAUNCHER, ROOT, ForkServer

SCRIPT = Path(__file__).with_name("script.py")
LIBRARIES = ("paddlenlp", "paddleformers")


def installed() -> str | None:
    """The library that has the Trainer; the project's own environment has neither."""
    found = (name for name in LIBRARIES if importlib.util.find_spec(name) is not None)
    return next(found, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if installed() is None:
        reason = "neither paddlenlp nor paddleformers is installed: make test-trainers"
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@dataclass(frozen=True)
class Training:
    """A process that has ended, and what it printed."""

    status: int
    output: str

    def steps(self) -> list[dict[str, int]]:
        """The recount after every step, by the script itself."""
        return [json.loads(line) for line in re.findall(r"^STEP (.*)$", self.output, re.MULTILINE)]

    @property
    def recount(self) -> dict[str, int]:
        """The recount after the last step."""
        return self.steps()[-1]

    def logged(self) -> list[tuple[int, str]]:
        """(global step, loss) of everything that the Trainer logged."""
        lines = re.findall(r"^LOG (\d+) (.*)$", self.output, re.MULTILINE)
        return [(int(step), loss) for step, loss in lines]

    def said(self, word: str) -> Any:
        (line,) = re.findall(rf"^{word} (.*)$", self.output, re.MULTILINE)
        return json.loads(line)

    def notices(self) -> list[str]:
        """What we have said, below a warning."""
        return re.findall(r"WARNING mlflow_tokens: (.*)$", self.output, re.MULTILINE)


Train = Callable[..., Training]


@pytest.fixture(scope="session")
def library() -> str:
    name = installed()
    assert name is not None
    return name


@pytest.fixture(scope="session")
def is_legacy(library: str) -> bool:
    """Whether this is PaddleNLP 2, on Paddle 2."""
    return importlib.metadata.version(library).startswith("2.")


@pytest.fixture(scope="session")
def server(library: str) -> Iterator[ForkServer]:
    server = ForkServer(f"{library}.trainer", f"{library}.transformers", f"{library}.peft")
    yield server
    server.close()


@pytest.fixture
def train(server: ForkServer, library: str, is_legacy: bool, store: str, tmp_path: Path) -> Train:
    """Run one training in a fork: `train(batches="packed")`; its working directory is the test's.

    kill_after: it hangs after this step, and is killed once the step is in the journal.
    """
    environ = {"MLFLOW_TRACKING_URI": store, "MLFLOW_TOKENS_JOURNAL_DIR": str(tmp_path / "journal")}

    def run(*, kill_after: int | None = None, **case: Any) -> Training:
        if case.get("tokenizer") and is_legacy:
            pytest.skip("PaddleNLP 2.8 has no tokenizer that is made without files")
        (tmp_path / "workerlog.0").unlink(missing_ok=True)
        (tmp_path / "workerlog.0.status").unlink(missing_ok=True)
        argument = json.dumps({"library": library, "hang_after": kill_after, **case})
        job = server.start(argument, cwd=tmp_path, script=SCRIPT, **environ)
        if kill_after is not None:
            job.until_recorded("step", kill_after, tmp_path / "journal")
            job.send(signal.SIGKILL)
        training = Training(job.wait(), job.output())
        assert training.status == (0 if kill_after is None else -signal.SIGKILL), training.output
        return training

    return run


@pytest.fixture
def train_alone(library: str, store: str, tmp_path: Path) -> Train:
    """The same in a new interpreter, which has not loaded the library when the script begins."""
    environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MLFLOW_TRACKING_URI": store}

    def run(**case: Any) -> Training:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), json.dumps({"library": library, **case})],
            cwd=tmp_path,
            env=os.environ | environ,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return Training(done.returncode, done.stdout + done.stderr)

    return run


@pytest.fixture
def launch(library: str, store: str, tmp_path: Path) -> Callable[..., list[Training]]:
    """The same under Paddle's launcher, data parallel: what each rank has printed."""
    environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MLFLOW_TRACKING_URI": store}

    def run(processes: int, **case: Any) -> list[Training]:
        options = [f"--nproc_per_node={processes}", f"--log_dir={tmp_path / 'logs'}"]
        done = subprocess.run(
            [sys.executable, "-m", LAUNCHER, *options, str(SCRIPT), json.dumps({"library": library, **case})],
            cwd=tmp_path,
            env=os.environ | environ,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        logs = [path.read_text() for path in sorted((tmp_path / "logs").glob("workerlog.*"))]
        assert done.returncode == 0, "\n".join(logs) + done.stderr
        return [Training(done.returncode, log) for log in logs]

    return run
