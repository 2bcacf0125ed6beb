"""A proxy in front of an HTTP server that fails in the ways servers and networks do, when it is told to.

One thread serves all proxies. What happens to a request depends on how many have come, never on the time.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from tests.faults.ports import reserve_port

Behaviour = Literal[
    "pass",
    "refuse",  # nobody listens
    "hang",  # the request is taken and never answered
    "late",  # as above, but the server gets it once the client has gone
    "slow",
    "http500",
    "http503",
    "http429",
    "html",  # a login page of something in between, with status 200
    "cut_before",  # the connection breaks and the server never saw the request
    "cut_after",  # the server did it, the answer is lost
    "cut_within",  # the server did it, half an answer comes
]

T = TypeVar("T")

_STATUS = {"http500": "500 Internal Server Error", "http503": "503 Service Unavailable"}
_LONGEST_HEAD = 1 << 20


@dataclass(frozen=True)
class Window:
    """The `count` requests from the `first` on (from 0; None: all that follow) whose path holds `path`."""

    behaviour: Behaviour
    first: int
    count: int | None = None
    path: str = ""


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    head: bytes
    body: bytes


@dataclass
class _Watch:
    """Calls back when a request is the `number`-th (from 0) of its path."""

    path: str
    number: int
    callback: Callable[[], None]


@dataclass
class Seen:
    """What has come so far: requests by what happened to them, and those being held."""

    by_behaviour: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    """By the end of the path, those that the client got the server's own answer to."""
    held: int = 0
    under_way: int = 0
    """Requests that were taken and are not done with, those that are held included."""


class ProxyThread:
    """The thread that all proxies run on."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="proxies", daemon=True)
        self._thread.start()

    def do(self, what: Coroutine[Any, Any, T]) -> T:
        """Run on the thread and wait for the result."""
        result: Future[T] = asyncio.run_coroutine_threadsafe(what, self.loop)
        return result.result(30)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


class Proxy:
    """A port of its own in front of `server` ("http://host:port"). Methods are for any thread but its own."""

    def __init__(self, thread: ProxyThread, server: str) -> None:
        host, _, port = server.removeprefix("http://").partition(":")
        self._upstream = (host, int(port))
        self._thread = thread
        # Keeps the port ours while nobody listens: connections to it are refused.
        self._reserved = reserve_port()
        self.address = f"http://127.0.0.1:{self._reserved.getsockname()[1]}"
        self._listener: asyncio.Server | None = None
        self._behaviour: Behaviour = "pass"
        self._windows: tuple[Window, ...] = ()
        self._delay = 0.0
        self._counts: Counter[str] = Counter()
        self._window_counts: Counter[Window] = Counter()
        self._watches: list[_Watch] = []
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = threading.Condition()
        self._freed = asyncio.Event()
        self.seen = Seen()
        thread.do(self._listen())

    # ---- for the test -------------------------------------------------------------------------------

    def set(self, behaviour: Behaviour, windows: tuple[Window, ...] = (), delay: float = 0.0) -> None:
        """From now on requests meet `behaviour`, but for those in a window. Windows count from now on."""
        self._thread.do(self._set(behaviour, windows, delay))

    def on_request(self, path: str, number: int, callback: Callable[[], None]) -> None:
        """Call back, on the proxies' thread, when the `number`-th request (from 0, from now on) has come."""
        self._thread.do(self._add_watch(_Watch(path, number, callback)))

    def forget_watches(self) -> None:
        """No more callbacks for requests that have not come."""
        self._thread.do(self._forget_watches())

    def wait(self, condition: Callable[[Seen], bool], timeout: float) -> bool:
        """Wait until what was seen fulfils a condition; whether it did in time."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self.seen), timeout)

    def close(self) -> None:
        self._thread.do(self._close())

    # ---- on the thread ------------------------------------------------------------------------------

    async def _set(self, behaviour: Behaviour, windows: tuple[Window, ...], delay: float) -> None:
        self._behaviour, self._windows, self._delay = behaviour, windows, delay
        self._window_counts.clear()
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()
        if behaviour == "refuse":
            self._stop_listening()
            self._note(behaviour="refuse")
        else:
            await self._listen()

    async def _add_watch(self, watch: _Watch) -> None:
        watch.number += self._matching(watch.path)
        self._watches.append(watch)

    async def _forget_watches(self) -> None:
        self._watches.clear()

    async def _listen(self) -> None:
        if self._listener is None:
            listening = socket.socket()
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.bind(self._reserved.getsockname())
            self._listener = await asyncio.start_server(self._serve, sock=listening, limit=_LONGEST_HEAD)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for writer in list(self._connections):
            writer.transport.abort()

    async def _close(self) -> None:
        self._freed.set()
        self._stop_listening()
        self._reserved.close()
        for task in list(self._tasks):
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections.add(writer)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
                while await self._take(await _read_request(reader), reader, writer):
                    pass
        finally:
            self._tasks.discard(task)
            self._connections.discard(writer)
            writer.transport.abort()

    def _matching(self, path: str) -> int:
        return sum(count for seen, count in self._counts.items() if path in seen)

    def _choose(self, request: _Request) -> Behaviour:
        self._counts[request.path] += 1
        chosen: Behaviour | None = None
        for window in self._windows:
            if window.path in request.path:
                number = self._window_counts[window]
                self._window_counts[window] += 1
                inside = number >= window.first and (
                    window.count is None or number < window.first + window.count
                )
                if inside and chosen is None:
                    chosen = window.behaviour
        for watch in list(self._watches):
            if watch.path in request.path and self._matching(watch.path) > watch.number:
                self._watches.remove(watch)
                watch.callback()
        return chosen or self._behaviour

    def _note(self, **changes: str | int) -> None:
        with self._changed:
            if "behaviour" in changes:
                self.seen.by_behaviour[str(changes["behaviour"])] += 1
            if "answered" in changes:
                self.seen.answered[str(changes["answered"])] += 1
            self.seen.held += int(changes.get("held", 0))
            self.seen.under_way += int(changes.get("under_way", 0))
            self._changed.notify_all()

    async def _take(
        self, request: _Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        self._note(under_way=1)
        try:
            return await self._answer(request, reader, writer)
        finally:
            self._note(under_way=-1)

    async def _answer(
        self, request: _Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Do with a request what is due; whether the connection goes on."""
        behaviour, delay = self._choose(request), self._delay
        self._note(behaviour=behaviour)
        if behaviour == "refuse":  # the server goes down with a request in its hands
            self._behaviour, self._windows = "refuse", ()
            self._stop_listening()
            return False
        if behaviour in ("hang", "late"):
            self._note(held=1)
            try:
                await self._hold(reader)
                if behaviour == "late":
                    await self._forward(request)
            finally:
                self._note(held=-1)
            return False
        if behaviour == "cut_before":
            _reset(writer)
            return False
        if behaviour in ("http500", "http503", "http429", "html"):
            writer.write(_made_up(behaviour))
            await writer.drain()
            return True
        if behaviour == "slow":
            await asyncio.sleep(delay)
        answer = await self._forward(request)
        if behaviour == "cut_after":
            return False
        writer.write(answer[: len(answer) // 2] if behaviour == "cut_within" else answer)
        await writer.drain()
        if behaviour != "cut_within":
            self._note(answered=request.path.rpartition("/")[2])
        return behaviour != "cut_within"

    async def _hold(self, reader: asyncio.StreamReader) -> None:
        """Keep a client waiting until it gives up or the behaviour changes."""
        freed = asyncio.ensure_future(self._freed.wait())
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({freed, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            freed.cancel()
            gone.cancel()

    async def _forward(self, request: _Request) -> bytes:
        reader, writer = await asyncio.open_connection(*self._upstream)
        try:
            writer.write(_replace_connection(request.head, b"close") + request.body)
            answer = await reader.read()
        finally:
            writer.close()
        head, separator, body = answer.partition(b"\r\n\r\n")
        return _replace_connection(head + separator, b"keep-alive") + body


async def _read_request(reader: asyncio.StreamReader) -> _Request:
    head = await reader.readuntil(b"\r\n\r\n")
    method, path, _ = head.split(b" ", 2)
    length = 0
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            length = int(value)
    return _Request(method.decode(), path.decode(), head, await reader.readexactly(length))


def _replace_connection(head: bytes, value: bytes) -> bytes:
    lines = [
        line for line in head.rstrip(b"\r\n").split(b"\r\n") if not line.lower().startswith(b"connection:")
    ]
    return b"\r\n".join([*lines, b"Connection: " + value, b"", b""])


def _made_up(behaviour: str) -> bytes:
    if behaviour == "http429":
        status, extra = "429 Too Many Requests", "Retry-After: 1\r\n"
    else:
        status, extra = _STATUS.get(behaviour, "200 OK"), ""
    body = (
        "<html><body>Please log in</body></html>"
        if behaviour == "html"
        else '{"error_code": "INTERNAL_ERROR"}'
    )
    kind = "text/html" if behaviour == "html" else "application/json"
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{extra}Content-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST, as a machine does that has lost its memory of it."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
