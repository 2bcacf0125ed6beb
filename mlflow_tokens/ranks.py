"""How ranks hand their readings to rank 0: over sockets of our own, asked for by rank 0.

No training communicator is used and nobody waits for anybody without a limit (see
docs/decisions/0002). Rank 0 listens; every other rank connects from a background thread and answers
"what are your totals at the end of step k?" once it has finished step k. Readings are cumulative, so a
lost answer costs nothing but freshness. One JSON object a line.
"""

from __future__ import annotations

import hashlib
import json
import math
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from mlflow_tokens.clock import PHASES
from mlflow_tokens.lengths import Lengths
from mlflow_tokens.meter import Reading
from mlflow_tokens.notices import logger
from mlflow_tokens.topology import Place

PROTOCOL = 1
_LINE_LIMIT = 64 * 1024
#: Seconds between attempts to reach rank 0, and between looks at whether an asked-for step is finished.
_RETRY = 0.5
_LOOK = 0.02
#: Seconds after which a rank that has not finished the step asked for answers with what it has.
_PATIENCE, _PATIENCE_LIVE = 4.0, 0.5
#: Seconds that all questions together may take which still wait when a run ends.
_HURRY = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """A distributed job as its environment describes it: who we are and where rank 0 listens.

    devices_by_node: a process holds one device, so these are the processes on each node.
    """

    rank: int
    world_size: int
    devices_by_node: tuple[int, ...]
    address: tuple[str, int] | None
    name: str
    """Equal on all ranks of a job and on no other job's."""


def job_from_environment(environ: Mapping[str, str]) -> Job:
    """Read what Paddle's launcher and `paddle.distributed.spawn` tell their workers.

    Every rank is given an endpoint of its own. The launcher uses another port for Paddle's store
    (PADDLE_MASTER), so that rank 0's endpoint is free; `spawn` puts the store there, and then rank 1's
    is taken, which lies on the same machine.
    """
    rank = int(environ.get("PADDLE_TRAINER_ID", "0"))
    endpoints = [
        item.strip() for item in environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",") if item.strip()
    ]
    world_size = int(environ.get("PADDLE_TRAINERS_NUM", len(endpoints) or 1))
    address = None
    if world_size > 1 and len(endpoints) >= 2:
        store_elsewhere = "PADDLE_MASTER" in environ or "MASTER_PORT" in environ
        host, _, port = endpoints[0 if store_elsewhere else 1].rpartition(":")
        address = (host, int(port))
    by_node = Counter(endpoint.rpartition(":")[0] for endpoint in endpoints)
    name = hashlib.sha256(",".join(endpoints).encode()).hexdigest()[:16]
    return Job(rank, world_size, tuple(by_node.values()) or (world_size,), address, name)


class RankServer:
    """Rank 0's side. `collect` returns the newest reading of every other rank that has reported.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, job: Job, address: tuple[str, int]) -> None:
        self._job = job
        self._socket = socket.create_server(address, backlog=min(job.world_size, 1024))
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._changed = threading.Condition()
        self._peers: dict[socket.socket, _Peer] = {}
        self._readings: dict[int, Reading] = {}
        self._question: Question | None = None
        self._asked = 0
        self._answers: dict[int, int] = {}
        self._behind: set[int] = set()
        self._hurry_until = math.inf
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="mlflow_tokens-ranks", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Where the server listens."""
        host, port = self._socket.getsockname()[:2]
        return host, port

    def collect(self, question: Question, timeout: float, wait_for_absent: bool) -> dict[int, Reading]:
        """Ask all other ranks, wait at most `timeout` s, and return the newest reading of each.

        Ranks that are connected are waited for, and those that have never been if `wait_for_absent`.
        A rank that has said its last counts with that; one that is behind is not waited for again until
        it has caught up.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._asked += 1
            self._question = question
            self._wake()
            while self._missing(wait_for_absent) and not self._closing:
                left = (deadline if question.live else min(deadline, self._hurry_until)) - time.monotonic()
                if left <= 0:
                    self._behind |= {rank for rank in self._others() if self._waits_for(rank, False)}
                    break
                self._changed.wait(left)
            return dict(self._readings)

    def hurry(self, hurry: bool) -> None:
        """The end of a run waits: have questions about steps before it take a second in all."""
        with self._changed:
            self._hurry_until = time.monotonic() + _HURRY if hurry else math.inf
            self._changed.notify_all()

    def close(self) -> None:
        """Stop listening. Ranks still connected notice and go on without us."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._wake()
        self._thread.join(1.0)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # so many calls wait already that the server wakes up anyway
            self._wake_write.send(b"w")

    def _others(self) -> range:
        return range(1, self._job.world_size)

    def _missing(self, wait_for_absent: bool) -> bool:
        return any(self._waits_for(rank, wait_for_absent) for rank in self._others())

    def _waits_for(self, rank: int, wait_for_absent: bool) -> bool:
        question, reading = self._question, self._readings.get(rank)
        assert question is not None
        if reading is not None and reading.final:
            return False
        if self._answers.get(rank) == self._asked and not question.last:
            return False
        if not question.live and rank in self._behind:
            return False
        connected = any(peer.rank == rank for peer in self._peers.values())
        return connected or (wait_for_absent and reading is None)

    def _serve(self) -> None:
        asked = 0
        while not self._closing:
            for key, _ in self._selector.select(timeout=1.0):
                if key.fileobj is self._socket:
                    self._accept()
                elif key.fileobj is self._wake_read:
                    self._wake_read.recv(4096)
                else:
                    self._receive(key.fileobj)  # type: ignore[arg-type]
            with self._changed:
                number = self._asked
                peers = [connection for connection, peer in self._peers.items() if peer.rank is not None]
            if number != asked:
                asked = number
                for connection in peers:
                    self._ask(connection)
        for connection in list(self._peers):
            self._drop(connection)
        self._selector.close()
        self._socket.close()

    def _accept(self) -> None:
        connection, _ = self._socket.accept()
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        with self._changed:
            self._peers[connection] = _Peer()

    def _ask(self, connection: socket.socket) -> None:
        with self._changed:
            number, question = self._asked, self._question
        if question is None:
            return
        try:
            connection.sendall(_line({"number": number, "step": question.step, "live": question.live}))
        except OSError:
            self._drop(connection)

    def _receive(self, connection: socket.socket) -> None:
        peer = self._peers[connection]
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        peer.buffer += data
        *lines, peer.buffer = peer.buffer.split(b"\n")
        try:
            if len(peer.buffer) > _LINE_LIMIT:
                raise ValueError("a line is too long")
            for line in lines:
                self._understand(connection, peer, json.loads(line))
        except Exception as error:
            # Anybody may connect: whatever they send ends their connection and nothing else.
            logger.warning("Refused a connection to rank 0's port: %s: %s", type(error).__name__, error)
            self._drop(connection)

    def _understand(self, connection: socket.socket, peer: _Peer, message: Mapping[str, Any]) -> None:
        if peer.rank is None:
            if message.get("job") != self._job.name or message.get("protocol") != PROTOCOL:
                raise ValueError("it is not a rank of this job with this version of mlflow_tokens")
            rank = int(message["rank"])
            if not 0 < rank < self._job.world_size:
                raise ValueError(f"there is no rank {rank} in this job")
            with self._changed:
                peer.rank = rank
            self._ask(connection)
            return
        reading = _reading_of(message["reading"])
        if reading.rank != peer.rank:
            raise ValueError(f"rank {peer.rank} speaks for rank {reading.rank}")
        with self._changed:
            self._readings[peer.rank] = reading
            number = self._answers[peer.rank] = int(message.get("number", 0))
            if number == self._asked and self._question is not None:
                caught_up = reading.step >= self._question.step
                (self._behind.discard if caught_up else self._behind.add)(peer.rank)
            self._changed.notify_all()

    def _drop(self, connection: socket.socket) -> None:
        with self._changed:
            if self._peers.pop(connection, None) is None:
                return
            self._changed.notify_all()
        self._selector.unregister(connection)
        connection.close()


class Question(NamedTuple):
    """Which totals are wanted: at the end of `step`, or of the newest step with the seconds of now (`live`).

    last: the job is ending, so wait for what each rank says last.
    """

    step: int
    live: bool = False
    last: bool = False


@dataclass(slots=True)
class _Peer:
    rank: int | None = None
    buffer: bytes = b""


class RankClient:
    """Another rank's side: a background thread that answers rank 0 from `read`.

    `read(step, live)` gives the totals that a `Question` asks for, or None while `step` is not finished.
    """

    def __init__(
        self, job: Job, address: tuple[str, int], read: Callable[[int, bool], Reading | None]
    ) -> None:
        self._job, self._address, self._read = job, address, read
        self._last: Reading | None = None
        self._reached = False
        self._closing = threading.Event()
        self._said_last = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlflow_tokens-rank", daemon=True)
        self._thread.start()

    def close(self, last: Reading, timeout: float) -> bool:
        """Send the last reading; whether rank 0 took it within `timeout` s.

        A rank 0 that was never reached (it does not use us) is waited for no longer than a connection takes.
        """
        self._last = last
        self._closing.set()
        return self._said_last.wait(timeout if self._reached else min(timeout, 2 * _RETRY))

    def _run(self) -> None:
        try:
            self._connect_until_done()
        except Exception as error:
            logger.warning("Rank %d no longer reports to rank 0: %r", self._job.rank, error)

    def _connect_until_done(self) -> None:
        while not self._said_last.is_set():
            try:
                with socket.create_connection(self._address, timeout=5.0) as connection:
                    self._talk(connection)
            except OSError:
                # Rank 0 is not there yet, or no longer: try again without a word.
                if self._closing.wait(_RETRY):
                    time.sleep(_RETRY / 10)

    def _talk(self, connection: socket.socket) -> None:
        connection.sendall(_line({"job": self._job.name, "protocol": PROTOCOL, "rank": self._job.rank}))
        question: Mapping[str, Any] | None = None
        patient_until = 0.0
        buffer = b""
        self._reached = True
        while True:
            if self._closing.is_set() and self._last is not None:
                connection.sendall(_line({"reading": asdict(self._last)}))
                self._said_last.set()
                return
            if question is not None:
                reading = self._read(question["step"], question["live"])
                if reading is None and time.monotonic() > patient_until:
                    reading = self._read(0, True)
                if reading is not None:
                    connection.sendall(_line({"number": question["number"], "reading": asdict(reading)}))
                    question = None
            connection.settimeout(_LOOK if question is not None else 10 * _LOOK)
            try:
                data = connection.recv(65536)
            except TimeoutError:
                continue
            if not data:
                raise ConnectionError("rank 0 has closed the connection")
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            if lines:
                question = json.loads(lines[-1])
                patience = _PATIENCE_LIVE if question["live"] else _PATIENCE
                patient_until = time.monotonic() + patience


def _reading_of(payload: Mapping[str, Any]) -> Reading:
    """Raises KeyError, TypeError or ValueError where it is not what `asdict(reading)` gives."""
    lengths = payload["lengths"]
    return Reading(
        rank=int(payload["rank"]),
        step=int(payload["step"]),
        micro_batches=int(payload["micro_batches"]),
        seconds={phase: float(payload["seconds"][phase]) for phase in PHASES},
        final=bool(payload["final"]),
        by_source={
            str(name): (_count_of(computed), _count_of(valid))
            for name, (computed, valid) in payload["by_source"].items()
        },
        lengths=Lengths(
            {int(length): tuple(map(int, bucket)) for length, bucket in lengths["buckets"].items()},  # type: ignore[misc]
            int(lengths["width"]),
            int(lengths["full"]),
        ),
        place=_place_of(payload["place"]),
        **{kind: _count_of(payload[kind]) for kind in ("computed", "valid", "trained", "skipped", "routed")},  # type: ignore[arg-type]
    )


def _place_of(payload: Mapping[str, Any]) -> Place:
    fingerprint = payload["fingerprint"]
    return Place(
        replica=bool(payload["replica"]),
        sequence=tuple(map(int, payload["sequence"])),
        fingerprint=None if fingerprint is None else (int(fingerprint[0]), int(fingerprint[1])),
    )


def _count_of(value: Any) -> int | None:
    return None if value is None else int(value)


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
