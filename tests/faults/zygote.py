"""The fork server's own process: loads everything slow once, then forks a child per job.

A child is a process like any other: it ends through Python's usual exit, dies of signals, and has its own
environment, working directory and output. What it has to say to the test goes through `Voice`: a pipe,
so that neither a full disk nor kill -9 takes it away.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import sys
import time
from typing import Any

#: Written to the pipe at once, so that lines of several children never mix (POSIX: PIPE_BUF).
_LONGEST_LINE = 4000


class Voice:
    """Lines from a child to the test."""

    def __init__(self, fd: int, job: int) -> None:
        self._fd, self._job = fd, job

    def say(self, event: str, **values: Any) -> None:
        line = json.dumps({"job": self._job, "event": event, **values}).encode() + b"\n"
        if len(line) > _LONGEST_LINE:
            raise ValueError("the line is too long to be written at once")
        os.write(self._fd, line)


class _Exit:
    """Leaves the child once all that it does at its exit is done: taking Paddle apart takes half a second.

    status: None where the interpreter is to end in its own way.
    """

    def __init__(self) -> None:
        self.status: int | None = None

    def leave(self) -> None:
        if self.status is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.status)


def main() -> None:
    # What is registered first is called last.
    end = _Exit()
    atexit.register(end.leave)
    modules = {name: importlib.import_module(name) for name in sys.argv[1:]}
    out = os.dup(1)
    os.dup2(2, 1)
    gc.collect()
    gc.freeze()
    Voice(out, 0).say("ready")
    child = _serve(out)
    if child is not None:
        # Outside of the server's loop, so that the child ends as a script does.
        module, function = child["target"].split(":")
        try:
            getattr(modules[module], function)(Voice(out, child["job"]), **child["arguments"])
            end.status = 0
        except SystemExit as error:
            end.status = error.code if isinstance(error.code, int) else None
            raise
        except Exception:
            end.status = 1
            raise
        finally:
            if child["whole_exit"]:
                end.status = None


def _serve(out: int) -> dict[str, Any] | None:
    """Fork on request. In a child, returns what it is to do; otherwise when the test is gone."""
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    children: dict[int, tuple[int, int]] = {}
    buffer = b""
    while True:
        for key, _ in selector.select():
            if key.fd != 0:
                _reap(key.fd, children, selector, out)
                continue
            data = os.read(0, 65536)
            if not data:
                for pid, _ in children.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return None
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                forked = time.monotonic()
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    for pidfd in children:
                        os.close(pidfd)
                    _become(request)
                    request["arguments"]["forked"] = forked
                    return dict(request)
                pidfd = os.pidfd_open(pid)
                children[pidfd] = (pid, request["job"])
                selector.register(pidfd, selectors.EVENT_READ)
                Voice(out, request["job"]).say("started", pid=pid)


def _reap(
    pidfd: int, children: dict[int, tuple[int, int]], selector: selectors.BaseSelector, out: int
) -> None:
    pid, job = children.pop(pidfd)
    selector.unregister(pidfd)
    os.close(pidfd)
    _, status, used = os.wait4(pid, 0)
    cpu = used.ru_utime + used.ru_stime
    Voice(out, job).say("exited", status=os.waitstatus_to_exitcode(status), cpu=round(cpu, 3))


def _become(request: dict[str, Any]) -> None:
    """Make the fork a process of its own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(request["cwd"])
    os.environ.update(request["environ"])


if __name__ == "__main__":
    main()
