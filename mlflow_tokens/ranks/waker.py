"""Wakes a thread that waits for sockets."""

from __future__ import annotations

import selectors
import socket
from contextlib import suppress


class Waker:
    """`wake` is for any thread; the one that waits has `socket` among those that it waits for."""

    def __init__(self) -> None:
        self.socket, self._other = socket.socketpair()
        self.socket.setblocking(False)
        self._other.setblocking(False)

    def wake(self) -> None:
        """Never blocks: where so many calls wait already, the thread wakes up anyway."""
        with suppress(OSError):
            self._other.send(b"w")

    def heard(self) -> None:
        """Called by the thread that was woken."""
        with suppress(OSError):
            self.socket.recv(65536)

    def wait(self, seconds: float) -> None:
        """Until it is woken, for a thread that waits for nothing else."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            if selector.select(seconds):
                self.heard()

    def close(self) -> None:
        """By the thread that waits, when it ends."""
        self.socket.close()
        self._other.close()
