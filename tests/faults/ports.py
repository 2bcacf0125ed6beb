"""Ports that nobody else is given: below the range from which the system takes those of clients."""

from __future__ import annotations

import os
import random
import socket

_FIRST, _LAST = 15_000, 32_000
# A generator of its own: which port is free is no part of a scenario.
_numbers = random.Random(os.getpid())


def reserve_port() -> socket.socket:
    """A socket that is bound and does not listen; the port is ours until it is closed.

    Others may bind the port too if they set SO_REUSEPORT, and then listen. A client that connects to a
    port in the clients' own range while nobody listens may end up talking to itself; not here.
    """
    for _ in range(1000):
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            # Without SO_REUSEPORT first: with it, the port of another case could be shared by accident.
            _bind_exclusively(port := _numbers.randrange(_FIRST, _LAST))
            reserved.bind(("127.0.0.1", port))
        except OSError:
            reserved.close()
            continue
        return reserved
    raise OSError("no free port was found")


def _bind_exclusively(port: int) -> None:
    with socket.socket() as attempt:
        attempt.bind(("127.0.0.1", port))


def free_ports(count: int) -> list[int]:
    """Ports that are free now, for servers that bind them without SO_REUSEPORT."""
    sockets = [reserve_port() for _ in range(count)]
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports
