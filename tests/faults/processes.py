"""Real processes for the test: forked by a server of their own, watched through a pipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent

#: Loaded before the first fork, the targets of `ForkServer.start` among them. Without Paddle a fork costs
#: a fifth of the time.
MODULES = ("tests.faults.job", "tests.faults.command", "mlflow_tokens.sync", "mlflow_tokens.tracker")

Event = Mapping[str, Any]

#: Numbers of jobs, of whichever server.
_jobs = count(1)


class Overdue(Exception):
    """A process did not do in time what it was waited for."""


class Process:
    """A forked child. Its events come in the order in which it said them; the last one is "exited"."""

    def __init__(self, job: int, folder: Path, log: Path) -> None:
        self.job = job
        self.log = log
        self.pid = 0
        self.status: int | None = None
        self.events: list[Event] = []
        self._changed = threading.Condition()
        self.gate = folder / f"gate-{job}"
        os.mkfifo(self.gate)
        self._gate = os.open(self.gate, os.O_RDWR | os.O_NONBLOCK)

    def follow(self, seconds: float) -> Iterator[Event]:
        """Every event, up to the exit.

        Raises:
            Overdue: the process has not ended after so many seconds.
        """
        deadline = time.monotonic() + seconds
        for number in count():
            event = self._event(number, deadline)
            yield event
            if event["event"] == "exited":
                return

    def _event(self, number: int, deadline: float) -> Event:
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(lambda: len(self.events) > number, left):
                raise Overdue(f"process {self.pid} (job {self.job}) has not ended in time")
            return self.events[number]

    def wait(self, seconds: float) -> int:
        """Wait for the exit and return the status: minus the signal, if it died of one."""
        for _ in self.follow(seconds):
            pass
        assert self.status is not None
        return self.status

    def let_go(self) -> None:
        """Let a child go on that waits at its gate, or will."""
        with self._changed:
            if self.status is None:
                os.write(self._gate, b"g")

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        with self._changed:
            if self.status is None and self.pid:
                # Reaped only by the fork server, which says so afterwards; a pid is not used again so soon.
                try:
                    os.kill(self.pid, number)
                except ProcessLookupError:
                    return

    def heard(self, event: Event) -> None:
        """Take down what the process said, and when that was."""
        event = {**event, "heard": time.monotonic()}
        with self._changed:
            if event["event"] == "started":
                self.pid = event["pid"]
            if event["event"] == "exited":
                self.status = event["status"]
                os.close(self._gate)
            self.events.append(event)
            self._changed.notify_all()


class ForkServer:
    """Starts the zygote and hands out its children. `start` may be called from several threads."""

    def __init__(self, log: Path, *more_modules: str) -> None:
        quiet = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "MLFLOW_"))
        }
        with log.open("ab") as output:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.zygote", *MODULES, *more_modules],
                cwd=ROOT,
                env=kept | quiet | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        self._log = log
        self._lock = threading.Lock()
        self._running: dict[int, Process] = {}
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, name="fork-server", daemon=True)
        self._reader.start()

    def start(
        self,
        target: str,
        arguments: Mapping[str, Any],
        environ: Mapping[str, str],
        folder: Path,
        log: Path,
        *,
        whole_exit: bool = False,
    ) -> Process:
        """A child that calls `target` ("module:function") with a voice and the arguments.

        folder: its working directory, where its gate is made. whole_exit: the interpreter takes itself
        apart after its exit handlers, as it does without us; otherwise the process ends then.
        """
        if not self._ready.wait(120) or self._server.poll() is not None:
            raise Overdue(f"the fork server does not come up:\n{self._log.read_text()[-3000:]}")
        with self._lock:
            job = next(_jobs)
            process = self._running[job] = Process(job, folder, log)
            request = {
                "job": process.job,
                "target": target,
                "arguments": {**arguments, "gate": str(process.gate)},
                "environ": dict(environ),
                "cwd": str(folder),
                "log": str(log),
                "whole_exit": whole_exit,
            }
            assert self._server.stdin is not None
            self._server.stdin.write(json.dumps(request).encode() + b"\n")
            self._server.stdin.flush()
        return process

    def close(self) -> None:
        """Stop the server; children that still run are killed."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        try:
            self._server.wait(15)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def _read(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                self._ready.set()
                continue
            with self._lock:
                process = self._running[event["job"]]
                if event["event"] == "exited":
                    del self._running[event["job"]]
            process.heard(event)
        self._ready.set()
