"""Runs tests/scripts/train.py in real processes and reads its recount."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = SCRIPTS / "train.py"
LAUNCHER = "paddle.distributed.launch"
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Done:
    """A job that has ended: its exit status, what every rank printed, and the sum of their recounts."""

    status: int
    output: str
    recount: dict[str, int]


def run_alone(*arguments: str, cwd: Path, **environ: str) -> Done:
    return _run([sys.executable, str(SCRIPT), *arguments], cwd, environ, None)


def launch(processes: int, *arguments: str, cwd: Path, script: Path = SCRIPT, **environ: str) -> Done:
    """Under `python -m paddle.distributed.launch`, as a user would."""
    logs = cwd / "logs"
    command = [sys.executable, "-m", LAUNCHER, f"--nproc_per_node={processes}", f"--log_dir={logs}"]
    return _run([*command, str(script), *arguments], cwd, environ, logs)


def _environment(environ: dict[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
    return inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environ


def _run(command: list[str], cwd: Path, environ: dict[str, str], logs: Path | None) -> Done:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=_environment(environ),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    output = done.stdout + done.stderr
    if logs is not None:
        output = "\n".join(path.read_text() for path in sorted(logs.glob("workerlog.*")))
    recount: dict[str, int] = {"ranks": 0, "computed": 0, "valid": 0, "trained": 0}
    for line in re.findall(r"^RECOUNT (.*)$", output, re.MULTILINE):
        counted = json.loads(line)
        recount["ranks"] += 1
        for kind in ("computed", "valid", "trained"):
            recount[kind] += counted[kind]
    return Done(done.returncode, output, recount)


# ---- jobs that are watched while they run -------------------------------------------------------------


class Job:
    """A job that runs, or has ended; each of its ranks writes a log."""

    def __init__(self, pid: int, logs: Path, poll: Callable[[], int | None]) -> None:
        self.pid, self._logs, self.poll = pid, logs, poll

    def output(self, rank: int = 0) -> str:
        """What a rank has printed so far."""
        path = self._logs / f"workerlog.{rank}"
        return path.read_text() if path.exists() else ""

    def recounts(self, word: str = "STEP", rank: int = 0) -> list[dict[str, int]]:
        """The recounts that a rank has printed with this word so far."""
        lines: list[str] = re.findall(rf"^{word} (\{{.*\}})$", self.output(rank), re.MULTILINE)
        return [json.loads(line) for line in lines]

    def until(self, reached: Callable[[], Any], what: str, seconds: float = 90.0) -> None:
        """Wait for something that the running job does."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert self.poll() is None or reached(), f"ended before {what}:\n{self.output()}"
            assert time.monotonic() < deadline, f"no {what} in {seconds} s:\n{self.output()}"
            time.sleep(0.02)

    def until_said(self, word: str, rank: int = 0) -> None:
        """Wait for a line that begins with this word."""
        self.until(lambda: re.search(rf"^{word}\b", self.output(rank), re.MULTILINE), word)

    def until_recorded(self, kind: str, step: int, journals: Path) -> None:
        """Wait until the journal holds a snapshot."""
        wanted = (kind, step)
        self.until(lambda: wanted in [(r["kind"], r["step"]) for r in recorded(journals)], f"{wanted}")

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = 90.0) -> int:
        """The exit status: minus the signal, if it died of one."""
        deadline = time.monotonic() + seconds
        while (status := self.poll()) is None:
            assert time.monotonic() < deadline, f"still there after {seconds} s:\n{self.output()}"
            time.sleep(0.02)
        return status


def recorded(journals: Path, record: str = "quantities") -> list[dict[str, Any]]:
    """The records of a kind in the only journal of a directory, read without the package."""
    paths = list(journals.glob("*.jsonl"))
    if not paths:
        return []
    (path,) = paths
    with suppress(FileNotFoundError):  # it is given the run's name now
        lines = path.read_bytes().split(b"\n")[:-1]
        records = [json.loads(line.split(b" ", 1)[1]) for line in lines]
        return [each for each in records if each["record"] == record]
    return []


class ForkServer:
    """Starts scripts in processes that need not load Paddle and MLflow first, nor the modules named."""

    def __init__(self, *modules: str) -> None:
        inherited = {name: value for name, value in _environment({}).items() if not name.startswith("MLFLOW")}
        self._server = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "fork_server.py"), *modules],
            env=inherited | {"MLFLOW_DISABLE_TELEMETRY": "true"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, *arguments: str, cwd: Path, script: Path = SCRIPT, **environ: str) -> Job:
        """One process of the script."""
        return self._start(str(script), arguments, environ, cwd / "workerlog.0", cwd)

    @contextmanager
    def launch(self, processes: int, *arguments: str, cwd: Path, **environ: str) -> Iterator[Job]:
        """The script under Paddle's launcher: this is the fork, and its workers load everything."""
        logs = cwd / "logs"
        options = (f"--nproc_per_node={processes}", f"--log_dir={logs}", str(SCRIPT), *arguments)
        job = self._start(LAUNCHER, options, environ, cwd / "launcher.log", logs)
        try:
            yield job
        finally:
            if job.poll() is None:  # it ends its workers first
                job.send(signal.SIGTERM)
                job.wait()

    def _start(
        self, script: str, arguments: Sequence[str], environ: dict[str, str], output: Path, logs: Path
    ) -> Job:
        request = {
            "script": script,
            "arguments": arguments,
            "environ": _environment(environ),
            "cwd": str(output.parent),
            "output": str(output),
        }
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        pid = int(self._server.stdout.readline())

        def poll() -> int | None:
            path = output.with_name(output.name + ".status")
            return int(path.read_text()) if path.exists() else None

        return Job(pid, logs, poll)

    def close(self) -> None:
        """Stop the server, and whatever still runs."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(30)
