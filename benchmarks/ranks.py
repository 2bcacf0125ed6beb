"""What readings of up to 4,096 ranks cost rank 0: real connections on loopback, from another process."""

from __future__ import annotations

import json
import random
import resource
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from benchmarks.live import thread_seconds
from mlflow_tokens.aggregate import Moment, Past, quantities
from mlflow_tokens.clock import PHASES, PhaseClock
from mlflow_tokens.lengths import Lengths
from mlflow_tokens.meter import Meter, Reading
from mlflow_tokens.ranks import Job, Question
from mlflow_tokens.ranks.gate import hello
from mlflow_tokens.ranks.wire import Encoder, Origin, Said, split
from mlflow_tokens.records import SegmentStart
from mlflow_tokens.team import Team

ROOT = Path(__file__).parent.parent
JOB, NODE, INTERVAL, SEED = "benchmark", 8, 10.0, 1
#: Steps before the first snapshot that is measured, and between two.
BEFORE, EVERY = 20_000, 10


# ---- the other ranks, in a process of their own -------------------------------------------------------


def reading(rank: int, step: int, numbers: random.Random) -> Reading:
    """What a data parallel rank says after so many steps of 8 rows of 2,048 tokens with padding."""
    rows = {1 << octave: 2 * step // 3 for octave in range(12)}
    return Reading(
        rank=rank,
        step=step,
        micro_batches=step,
        computed=step * 8 * 2048,
        valid=step * 8 * 2048 - numbers.randrange(step * 2048),
        trained=step * 8 * 2040 - numbers.randrange(step * 2048),
        seconds={phase: 0.0 if phase == "restart" else numbers.random() * step for phase in PHASES},
        lengths=Lengths({length: (n, n * 2048, n * length) for length, n in rows.items()}, 2048, step // 9),
    )


def be_the_others(port: int, world_size: int, relayed: bool) -> None:
    """Connect as all ranks but 0, or as the first ranks of all nodes but rank 0's for theirs, and answer."""
    numbers = random.Random(SEED)
    serials = count(1)
    firsts = range(NODE, world_size, NODE) if relayed else range(0)
    alone = range(1, min(NODE, world_size) if relayed else world_size)
    with selectors.DefaultSelector() as selector:
        for ranks in [[rank] for rank in alone] + [list(range(first, first + NODE)) for first in firsts]:
            connection = socket.create_connection(("127.0.0.1", port), timeout=30.0)
            connection.sendall(hello(JOB, [Origin(rank, rank, 1, 0) for rank in ranks]))
            selector.register(connection, selectors.EVENT_READ, [ranks, Encoder(), b""])
        while True:
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(65536)
                if not data:
                    return
                ranks, encoder, rest = key.data
                lines, key.data[2] = split(rest, data)
                for asked in (message for message in map(json.loads, lines) if "number" in message):
                    said = [Said(next(serials), reading(rank, asked["step"], numbers)) for rank in ranks]
                    for text in encoder.lines(asked["number"], said, fine=False):
                        key.fileobj.sendall(text)


@contextmanager
def _others(port: int, world_size: int, *, relayed: bool) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.ranks", str(port), str(world_size), str(int(relayed))]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


# ---- rank 0 -------------------------------------------------------------------------------------------


def measure() -> list[tuple[str, str, str]]:
    """Lines of the report; takes about 45 s."""
    _open_files(3 * 4096)
    lines = []
    for ranks, relayed in ((1, False), (8, False), (64, False), (64, True), (512, False), (512, True)):
        lines += _lines(ranks, relayed, rank_0(ranks, relayed=relayed, intervals=0))
    lines += _lines(4096, False, rank_0(4096, relayed=False, intervals=0))
    lines += _lines(4096, True, rank_0(4096, relayed=True, intervals=2))
    early = rank_0(4096, relayed=True, intervals=0, before=100)
    return lines + _lines(4096, True, early, ", in its first 200 steps")


def rank_0(world_size: int, *, relayed: bool, intervals: int, before: int = BEFORE) -> dict[str, float]:
    """Percent of a core of rank 0's threads at one snapshot every 10 s.

    intervals: how many of these are waited for; for 0 snapshots are measured, and a second of silence.
    before: steps that were trained before; in the first ones, lengths of rows are news in every reading.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    nodes = (NODE,) * (world_size // NODE) or (world_size,)
    meter = Meter(0, PhaseClock())
    for _ in range(before):
        meter.step()
    team = Team(Job(0, world_size, nodes, ("127.0.0.1", port), JOB), meter)
    segment = SegmentStart("a", "a", 0.0, world_size, "gpu", nodes, "", "", "", "")
    used: dict[str, float] = {}

    def snapshot() -> None:
        for _ in range(EVERY):
            meter.step()
        moment = Moment("step", Question(meter.current_step), meter.current_step, 0.0, 0.0)
        readings = team.collect(moment.question, 60.0)
        assert all(reading.step == meter.current_step for reading in readings.values())
        record = quantities(
            readings, segment=segment, seq=1, moment=moment, baseline={}, past=Past(resumed=False)
        )
        assert record.ranks_reporting == world_size

    def measured() -> None:
        for _ in range(3):
            snapshot()
        silent = 0.0
        time.sleep(0.02)  # the scheduler accounts for a stretch when it is over
        if not intervals:
            began = sum(thread_seconds().values())
            time.sleep(1.0)
            silent = INTERVAL * (sum(thread_seconds().values()) - began)
        taken = max(1, 3 * (not intervals) + intervals)
        at_first = thread_seconds()
        for _ in range(taken):
            snapshot()
            if intervals:
                time.sleep(INTERVAL)
        time.sleep(0.02)
        after = thread_seconds()
        for name, seconds in after.items():
            used[name] = 100 * (seconds - at_first.get(name, 0.0)) / taken / INTERVAL
        used["silence"] = 100 * silent / INTERVAL

    if world_size == 1:
        _on_recorder(measured)
    else:
        with _others(port, world_size, relayed=relayed):
            _on_recorder(measured)
    team.leave(5.0)
    return used


def _on_recorder(work: Callable[[], None]) -> None:
    """On a thread like the one that takes snapshots."""
    thread = threading.Thread(target=work, name="mlflow_tokens-recorder", daemon=True)
    thread.start()
    thread.join()


def _lines(ranks: int, relayed: bool, used: dict[str, float], when: str = "") -> list[tuple[str, str, str]]:
    how = "through node leaders" if relayed else "connected directly"
    sockets, recorder = used.get("mlflow_tokens-ranks", 0.0), used.get("mlflow_tokens-recorder", 0.0)
    what = f"CPU of rank 0 for {ranks:,} ranks, {how}{when}, 1 snapshot in 10 s, % of a core"
    limit = "1" if relayed or ranks <= NODE else ""
    total = sum(used.values())
    return [(what, f"{total:.2f} (sockets {sockets:.2f}, adding up {recorder:.2f})", limit)]


def _open_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


if __name__ == "__main__":
    if len(sys.argv) == 4:
        _open_files(3 * 4096)
        be_the_others(int(sys.argv[1]), int(sys.argv[2]), bool(int(sys.argv[3])))
    else:
        for item in measure():
            print(*item, sep=" | ", flush=True)
