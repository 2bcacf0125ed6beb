"""The sockets of one that listens to ranks: rank 0, or the first rank of a node."""

from __future__ import annotations

import json
import math
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from mlflow_tokens.meter import Reading
from mlflow_tokens.notices import say_once
from mlflow_tokens.ranks import gate
from mlflow_tokens.ranks.job import Address, Job
from mlflow_tokens.ranks.roll import Roll
from mlflow_tokens.ranks.waker import Waker
from mlflow_tokens.ranks.wire import HELLO_LIMIT, LINE_LIMIT, Decoder, Question, line, split

#: Seconds that all questions together may take which still wait when a run ends.
_HURRY = 1.0


class RankServer:
    """Rank 0's side. `collect` returns the newest reading of every other rank that has reported.

    Args:
        relays: of a node's first rank; it passes on what its ranks say and confirms what rank 0 has heard.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, job: Job, address: Address, *, relays: bool = False) -> None:
        self._job, self._relays = job, relays
        self._roll = Roll(job.relayed if relays else range(1, job.world_size), keeps=not relays)
        if not relays:
            self._roll.root = secrets.randbits(48) | 1
        self._socket = socket.create_server(address, backlog=gate.BACKLOG)
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._waker = Waker()
        self._selector.register(self._waker.socket, selectors.EVENT_READ)
        self._changed = threading.Condition()
        self._peers: dict[socket.socket, _Peer] = {}
        self._strangers: dict[socket.socket, None] = {}
        self._asked = 0
        self._heard: deque[int] = deque()
        """Ranks to be told that their last was heard."""
        self._most = gate.most_connections()
        self._hurry_until = math.inf
        self._closing = False
        name = "mlflow_tokens-relay" if relays else "mlflow_tokens-ranks"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def address(self) -> Address:
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
        roll = self._roll
        with self._changed:
            roll.ask(question, wait_for_absent=wait_for_absent)
            self._waker.wake()
            while roll.waiting and not self._closing:
                orphaned = roll.orphaned_until()
                limit = deadline if question.live else min(deadline, self._hurry_until)
                left = limit - time.monotonic()
                if left <= 0:
                    roll.give_up()
                elif roll.waiting:
                    self._changed.wait(
                        left if orphaned is None else max(0.0, min(left, orphaned - time.monotonic()))
                    )
            return roll.newest()

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
        self._waker.wake()
        self._thread.join(1.0)

    # ---- its thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._serve()
        except Exception as error:
            say_once("ranks server", "Ranks can no longer report: %r", error)
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            for connection in list(self._peers):
                self._drop(connection)
            self._selector.close()
            self._socket.close()
            self._waker.close()

    def _serve(self) -> None:
        for key, _ in self._selector.select(timeout=1.0):
            if key.fileobj is self._socket:
                self._accept()
            elif key.fileobj is self._waker.socket:
                self._waker.heard()
            elif key.data is not None:
                self._receive(key.data)
        if self._strangers:
            self._send_strangers_away()
        with self._changed:
            asked = None if self._asked == self._roll.number else self._question()
            self._asked = self._roll.number
        if asked is not None:
            for peer in [peer for peer in self._peers.values() if peer.ranks]:
                self._send(peer, asked)
        while self._heard:
            self._confirm(self._heard.popleft())

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:
            # It has gone again, or the process may open no more files: that is no reason to spin.
            gate.too_many().say()
            time.sleep(0.05)
            return
        connection.setblocking(False)
        peer = _Peer(connection, time.monotonic())
        self._peers[connection] = peer
        self._strangers[connection] = None
        self._selector.register(connection, selectors.EVENT_READ, peer)
        if len(self._peers) > self._most:
            self._refuse(peer, gate.too_many())
        elif len(self._strangers) > gate.STRANGERS:
            self._refuse(self._peers[next(iter(self._strangers))], gate.silent())

    def _send_strangers_away(self) -> None:
        now = time.monotonic()
        while self._strangers:
            peer = self._peers[next(iter(self._strangers))]
            if now - peer.since < gate.PATIENCE:
                break
            self._refuse(peer, gate.silent())

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            if peer.connection in self._strangers:
                gate.silent().say()
            self._drop(peer.connection)
            return
        lines, peer.buffer = split(peer.buffer, data)
        try:
            for text in lines:
                if peer.connection not in self._peers:
                    return
                self._understand(peer, text)
            if len(peer.buffer) > (LINE_LIMIT if peer.let_in else HELLO_LIMIT):
                raise gate.too_long(peer.buffer)
        except gate.Refused as refused:
            self._refuse(peer, refused)
        except Exception as error:
            # Whatever anybody sends ends their connection and nothing else.
            self._refuse(peer, gate.damaged(sorted(peer.ranks), error))

    def _understand(self, peer: _Peer, text: bytes) -> None:
        if not peer.let_in:
            origins = gate.check_hello(self._job.name, self._job.world_size, text)
            peer.let_in = True
            self._strangers.pop(peer.connection, None)
            self._connect(peer, origins)
            if not peer.ranks:
                # Not one that we take readings from, now: it tries again, or rank 0's next tracker has it.
                self._drop(peer.connection)
                return
            self._send(peer, line({"welcome": self._roll.root}))
            with self._changed:
                # What all are asked in this round it is asked with them.
                asked = self._question() if self._asked == self._roll.number else None
            if asked is not None:
                self._send(peer, asked)
            return
        message = json.loads(text)
        if "ranks" in message:
            self._connect(peer, gate.check_origins(self._job.world_size, message))
            return
        said = [peer.decoder.said(row) for row in message["readings"]]
        known = [one for one in said if one.reading.rank in peer.ranks]
        with self._changed:
            last = self._roll.take(message["number"], known)
            self._tell()
        if last and not self._relays:
            self._send(peer, line({"heard": last}))

    def _connect(self, peer: _Peer, origins: list[Any]) -> None:
        with self._changed:
            peer.ranks = self._roll.connect(peer, origins)
            peer.relays = peer.relays or len(origins) > 1
            self._tell()

    def _question(self) -> bytes | None:
        question = self._roll.question
        if question is None:
            return None
        return line(
            {
                "number": self._roll.number,
                "step": question.step,
                "live": question.live,
                "last": question.last,
                "root": self._roll.root,
            }
        )

    def _tell(self) -> None:
        """Something has changed on the roll."""
        if not self._roll.waiting:
            self._changed.notify_all()

    def _confirm(self, rank: int) -> None:
        for peer in [peer for peer in self._peers.values() if rank in peer.ranks]:
            self._send(peer, line({"heard": [rank]}))

    def _send(self, peer: _Peer, text: bytes) -> None:
        try:
            sent = peer.connection.send(text)
        except BlockingIOError:
            return  # it has not read the last thousands of questions: it does not answer this one
        except OSError:
            return  # it is gone; what it said before it went has yet to be read
        if sent < len(text):
            self._drop(peer.connection)

    def _refuse(self, peer: _Peer, refused: gate.Refused) -> None:
        refused.say()
        if refused.reason:
            self._send(peer, line({"refused": refused.reason}))
        self._drop(peer.connection)

    def _drop(self, connection: socket.socket) -> None:
        peer = self._peers.pop(connection, None)
        if peer is None:
            return
        self._strangers.pop(connection, None)
        with self._changed:
            self._roll.disconnect(peer, relay=peer.relays)
            self._tell()
        self._selector.unregister(connection)
        connection.close()


@dataclass(slots=True, eq=False)
class _Peer:
    connection: socket.socket
    since: float
    buffer: bytes = b""
    let_in: bool = False
    ranks: set[int] = field(default_factory=set)
    relays: bool = False
    decoder: Decoder = field(default_factory=Decoder)
