"""Ranks for tests: readings made up, and jobs on the addresses of loopback."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlflow_tokens.clock import PHASES
from mlflow_tokens.meter import Reading
from mlflow_tokens.notices import logger, set_up
from mlflow_tokens.ranks import Job, job_from_environment

#: Longer than anything here takes, shorter than anybody's patience.
LONG = 20.0


def job(rank: int, world_size: int, name: str = "job") -> Job:
    return Job(rank, world_size, (world_size,), ("127.0.0.1", 0), name)


def reading(rank: int, step: int, computed: int, final: bool = False) -> Reading:
    return Reading(rank, step, step, computed, computed, None, dict.fromkeys(PHASES, 1.5), final)


def wait_until(true: Callable[[], bool], seconds: float = LONG) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def endpoints(*nodes: int) -> list[str]:
    """One a rank, with so many ranks on each node: 127.0.0.1, 127.0.0.2, … stand for nodes."""
    found = []
    for number, ranks in enumerate(nodes, start=1):
        probes = [socket.create_server((f"127.0.0.{number}", 0)) for _ in range(ranks)]
        found += [f"127.0.0.{number}:{probe.getsockname()[1]}" for probe in probes]
        for probe in probes:
            probe.close()
    return found


def jobs(*nodes: int) -> list[Job]:
    """One a rank, of a job with so many ranks on each node."""
    everyone = endpoints(*nodes)
    return [
        job_from_environment(
            {
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": str(len(everyone)),
                "PADDLE_TRAINER_ENDPOINTS": ",".join(everyone),
                "PADDLE_MASTER": "127.0.0.1:1",
            }
        )
        for rank in range(len(everyone))
    ]


class Lines(logging.Handler):
    """The lines that the user is told."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def lines_said() -> Iterator[list[str]]:
    """What is said meanwhile, as on global rank 0."""
    set_up(silent=False)
    handler = Lines()
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
