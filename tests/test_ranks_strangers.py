"""Anybody may connect to the port: no sum changes, nobody waits, and each kind is worth one line."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from mlflow_tokens.ranks import Question, RankClient, RankServer, gate
from mlflow_tokens.ranks.wire import FIELDS, PROTOCOL, Encoder, Said
from tests.ranks import LONG, job, lines_said, reading, wait_until


@pytest.fixture
def said() -> Iterator[list[str]]:
    with lines_said() as lines:
        yield lines


@pytest.fixture
def server(said: list[str]) -> Iterator[RankServer]:
    server = RankServer(job(0, 3), ("127.0.0.1", 0))
    yield server
    server.close()


def hello(**changes: object) -> bytes:
    usual = {"job": "job", "protocol": PROTOCOL, "fields": FIELDS, "version": "9", "ranks": [[1, 7, 1, 0]]}
    return json.dumps(usual | changes).encode() + b"\n"


def send(server: RankServer, what: bytes) -> bytes:
    """What the server answers before it hangs up."""
    answer = b""
    with socket.create_connection(server.address, timeout=LONG) as foreign:
        with suppress(ConnectionError):
            foreign.sendall(what)
            foreign.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while data := foreign.recv(4096):
                answer += data
    return answer


def both_report(server: RankServer) -> bool:
    clients = []
    for rank in (1, 2):
        one = job(rank, 3)
        clients.append(
            RankClient(one, server.address, lambda step, live, rank=rank: reading(rank, step, 10 * rank))
        )
    found = server.collect(Question(1), LONG, True)
    for client in clients:
        client.over = True
        client.waker.wake()
    return {rank: one.computed for rank, one in found.items()} == {1: 10, 2: 20}


FOREIGN = "Something that is no rank of this job connects to the port of its ranks"
ROW = Encoder().lines(0, [Said(1, reading(1, 5, 5))], fine=False)[0]
SPOKEN_FOR = ROW.replace(b'"readings":[[1,', b'"readings":[[2,')


@pytest.mark.parametrize(
    ("what", "line"),
    [
        (b"GET / HTTP/1.1\r\nHost: rank0\r\n\r\n", FOREIGN),
        (b"\x16\x03\x01\x02\x00\x01\n", FOREIGN),  # TLS
        (b"\xff" * 100_000, FOREIGN),
        (b"[" * 50_000 + b"\n", FOREIGN),
        (b"[]\n", FOREIGN),
        (b"null\n", FOREIGN),
        (b'{"job": "job"', FOREIGN),  # half a line
        (b"", FOREIGN),  # a port scan
        (hello(job="another"), "Ranks of another job connect"),
        (hello(ranks=[[3, 7, 1, 0]]), FOREIGN),
        (hello(ranks=[[0, 7, 1, 0]]), FOREIGN),
        (hello(ranks=[[1, "7", 1, 0]]), FOREIGN),
        (hello(ranks=[[1, 7]]), FOREIGN),
        (hello(ranks=7), FOREIGN),
        (
            hello(protocol=PROTOCOL + 1),
            "Rank 1 runs mlflow_tokens 9, whose readings differ from those of 0.1.0 here",
        ),
        (hello(fields="other"), "Rank 1 runs mlflow_tokens 9, whose readings differ"),
        (b'{"job": "job", "protocol": 1, "rank": 2}\n', "Rank 2 runs mlflow_tokens of another version"),
        (hello() + b"?\n", "What rank 1 reports is not understood"),
        (hello() + b'{"number": 0, "readings": [[1]]}\n', "What rank 1 reports is not understood"),
        (hello() + b'{"number": 0, "readings": [[1' + b"0" * 5000 + b"]]}\n", "What rank 1 reports is not"),
        (hello() + b'{"ranks": [[5, 7, 1, 0]]}\n', "What rank 1 reports is not understood"),
    ],
)
def test_a_stranger_is_refused_with_one_line_and_changes_no_sum(
    server: RankServer, said: list[str], what: bytes, line: str
) -> None:
    for _ in range(5):
        send(server, what)
    wait_until(lambda: bool(said))
    assert len(said) == 1
    assert said[0].startswith(line)
    assert len(said[0]) < 250
    assert both_report(server)
    assert len(said) == 1


def test_a_rank_is_told_why_it_is_refused_and_does_not_come_again(
    server: RankServer, said: list[str]
) -> None:
    assert b'"refused":"rank 0 runs mlflow_tokens 0.1.0, and this is 9"' in send(server, hello(protocol=9))
    another = RankClient(job(1, 3, "another"), server.address, lambda step, live: reading(1, step, 5))
    another._thread.join(LONG)
    assert not another._thread.is_alive()
    assert "Rank 1 does not report to rank 0: this is another job" in said
    assert not another.close(reading(1, 5, 5, final=True), LONG)


def test_a_rank_does_not_speak_for_another(server: RankServer, said: list[str]) -> None:
    send(server, hello() + SPOKEN_FOR)
    assert server.collect(Question(1), 0.1, False) == {}


def test_thousands_of_strangers_are_worth_a_line_and_keep_nobody_waiting(
    server: RankServer, said: list[str]
) -> None:
    def knock() -> None:
        for _ in range(500):
            with suppress(OSError), socket.create_connection(server.address, timeout=LONG) as foreign:
                foreign.sendall(b"SSH-2.0-scan\r\n")

    began = time.monotonic()
    knocking = [threading.Thread(target=knock) for _ in range(4)]
    for thread in knocking:
        thread.start()
    assert both_report(server)
    for thread in knocking:
        thread.join(LONG)
    assert time.monotonic() - began < LONG  # as long as nobody has to wait for a connection
    wait_until(lambda: len(server._peers) <= 2)
    assert [line for line in said if "SSH" in line] == said[:1]
    assert len(said) <= 2  # and one about those that hang up before they were heard


def test_a_connection_that_takes_its_time_is_ended_and_keeps_nobody_waiting(
    server: RankServer, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "PATIENCE", 0.3)
    with socket.create_connection(server.address, timeout=LONG) as slow:
        slow.sendall(hello()[:5])
        assert both_report(server)
        assert slow.recv(1) == b""
    assert len(said) == 1
    assert "does not say who it is" in said[0]


def test_of_too_many_connections_that_say_nothing_the_oldest_is_ended(
    server: RankServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "STRANGERS", 3)
    monkeypatch.setattr(gate, "PATIENCE", 100 * LONG)
    silent = [socket.create_connection(server.address, timeout=LONG) for _ in range(5)]
    assert [one.recv(1) for one in silent[:2]] == [b"", b""]
    assert both_report(server)
    for one in silent:
        one.close()


def test_files_are_left_for_the_script(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "most_connections", lambda: 1)
    server = RankServer(job(0, 3), ("127.0.0.1", 0))
    first = RankClient(job(1, 3), server.address, lambda step, live: reading(1, step, 10))
    wait_until(lambda: 1 in server.collect(Question(1), 0.1, False))
    second = RankClient(job(2, 3), server.address, lambda step, live: reading(2, step, 20))
    wait_until(lambda: bool(said))
    assert set(server.collect(Question(2), 0.1, True)) == {1}
    assert said == [
        "More ranks connect to rank 0 than it may open files for: not all report. Raise ulimit -n."
    ]
    for one in (first, second):
        one.over = True
    server.close()


def test_a_rank_that_never_reads_holds_up_the_others_once(server: RankServer) -> None:
    """Its questions wait until nothing more fits; the server does not wait for it, and drops no other."""
    deaf = socket.create_connection(server.address, timeout=LONG)
    deaf.sendall(hello())
    wait_until(lambda: bool(server._roll.origins()))
    other = RankClient(job(2, 3), server.address, lambda step, live: reading(2, step, 20))
    assert set(server.collect(Question(1), 0.3, True)) == {2}
    began = time.monotonic()
    for step in range(2, 20):
        assert server.collect(Question(step), LONG, False)[2].step == step
    assert time.monotonic() - began < LONG / 2
    deaf.close()
    other.over = True


def test_a_last_word_that_has_not_been_read_yet_is_not_lost_to_a_question(server: RankServer) -> None:
    """The rank is gone when it is asked, and the question cannot be sent; what it said is still there."""
    read, held = server._selector.select, threading.Event()

    def select(timeout: float) -> list[object]:
        return [event for event in read(timeout) if not (held.is_set() and event[0].data is not None)]

    server._selector.select = select  # type: ignore[method-assign]
    leaving = socket.create_connection(server.address, timeout=LONG)
    leaving.sendall(hello())
    assert leaving.recv(1)  # a part of the welcome; closing with the rest unread resets the connection
    held.set()
    leaving.sendall(Encoder().lines(0, [Said(1, reading(1, 6, 60, final=True))], fine=False)[0])
    leaving.close()
    for step in (8, 9):
        server.collect(Question(step), 0.1, False)
    held.clear()
    wait_until(lambda: 1 in server.collect(Question(10), 0.1, True))
    assert server.collect(Question(10), 0.1, False)[1] == reading(1, 6, 60, final=True)
