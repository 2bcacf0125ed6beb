"""Ranks reach rank 0 over real sockets on loopback; whatever happens, nobody hangs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mlflow_tokens.meter import Reading
from mlflow_tokens.ranks import Question, RankClient, RankServer, job_from_environment
from mlflow_tokens.ranks.gate import hello
from mlflow_tokens.ranks.wire import Encoder, Origin, Said
from tests.ranks import LONG, job, reading, wait_until


@pytest.fixture
def server() -> Iterator[RankServer]:
    server = RankServer(job(0, 3), ("127.0.0.1", 0))
    yield server
    server.close()


def connect(server: RankServer, rank: int, read: Callable[[int, bool], Reading | None]) -> RankClient:
    return RankClient(job(rank, 3), server.address, read)


def test_rank_0_gets_the_totals_of_the_step_it_asks_for(server: RankServer) -> None:
    for rank in (1, 2):
        connect(server, rank, lambda step, live, rank=rank: reading(rank, step, 100 * rank + step))
    for step in (10, 20):
        readings = server.collect(Question(step), LONG, True)
        assert readings == {1: reading(1, step, 100 + step), 2: reading(2, step, 200 + step)}


def test_a_rank_that_is_behind_is_waited_for(server: RankServer) -> None:
    finished = {"step": 9}
    asked = []

    def read(step: int, live: bool) -> Reading | None:
        asked.append(step)
        finished["step"] += len(asked) == 3  # the step ends while rank 0 waits
        return reading(1, step, 7) if finished["step"] >= step else None

    connect(server, 1, read)
    connect(server, 2, lambda step, live: reading(2, step, 8))
    assert server.collect(Question(10), LONG, True)[1].step == 10
    assert len(asked) >= 3


def test_a_rank_that_has_said_its_last_counts_with_that(server: RankServer) -> None:
    one = connect(server, 1, lambda step, live: None)  # it never reaches step 10
    connect(server, 2, lambda step, live: reading(2, step, 8))
    assert one.close(reading(1, 6, 60, final=True), LONG)
    readings = server.collect(Question(10), LONG, True)
    assert (readings[1].step, readings[1].computed, readings[2].step) == (6, 60, 10)


def test_at_the_end_the_last_word_of_every_rank_is_waited_for(server: RankServer) -> None:
    clients = [connect(server, rank, lambda step, live, rank=rank: reading(rank, step, 1)) for rank in (1, 2)]
    assert set(server.collect(Question(10), LONG, True)) == {1, 2}
    for rank, client in enumerate(clients, start=1):
        assert client.close(reading(rank, 12, 99, final=True), LONG)
    readings = server.collect(Question(10, live=True, last=True), LONG, True)
    assert [readings[rank].computed for rank in (1, 2)] == [99, 99]


def test_a_rank_that_never_comes_costs_the_time_out_and_no_more(server: RankServer) -> None:
    connect(server, 1, lambda step, live: reading(1, step, 5))
    assert set(server.collect(Question(10), LONG, False)) <= {1}
    began = time.monotonic()
    readings = server.collect(Question(20), 0.3, True)
    assert 0.3 <= time.monotonic() - began < LONG
    assert set(readings) == {1}


def test_a_rank_that_is_far_behind_answers_with_what_it_has_and_is_not_waited_for_again(
    server: RankServer,
) -> None:
    connect(server, 1, lambda step, live: reading(1, 6, 60) if live else None)
    connect(server, 2, lambda step, live: reading(2, step, 8))
    behind = server.collect(Question(10), LONG, True)
    assert (behind[1].step, behind[2].step) == (6, 10)
    began = time.monotonic()
    assert server.collect(Question(20), LONG, True)[1].step == 6
    assert time.monotonic() - began < 3  # it takes 4 s to lose its patience


def test_at_the_end_of_a_run_a_rank_that_stopped_earlier_gives_its_totals_at_once(server: RankServer) -> None:
    connect(server, 1, lambda step, live: reading(1, 6, 60) if step <= 6 else None)
    connect(server, 2, lambda step, live: reading(2, step, 8))
    assert server.collect(Question(10, live=True), LONG, True)[1].computed == 60


def test_while_the_end_of_a_run_waits_a_snapshot_takes_what_there_is(server: RankServer) -> None:
    connect(server, 1, lambda step, live: reading(1, step, 5) if live or step < 20 else None)
    connect(server, 2, lambda step, live: reading(2, step, 8))
    assert server.collect(Question(10), LONG, True)[1].step == 10
    threading.Timer(0.2, server.hurry, [True]).start()
    began = time.monotonic()
    assert server.collect(Question(30), LONG, True)[1].step == 10
    assert time.monotonic() - began < 3


def test_a_rank_that_dies_leaves_its_last_totals_and_is_not_waited_for(server: RankServer) -> None:
    dying = socket.create_connection(server.address)
    dying.sendall(hello("job", [Origin(1, 1, 1, 0)]))
    (row,) = Encoder().lines(0, [Said(1, reading(1, 4, 44))], fine=False)
    dying.sendall(row)
    connect(server, 2, lambda step, live: reading(2, step, 8))
    wait_until(lambda: 1 in server.collect(Question(1), 0.1, False))
    dying.close()
    readings = server.collect(Question(10), LONG, True)
    assert (readings[1].step, readings[1].computed) == (4, 44)


def test_a_rank_whose_rank_0_is_gone_does_not_wait_longer_than_told() -> None:
    server = RankServer(job(0, 3), ("127.0.0.1", 0))
    client = connect(server, 1, lambda step, live: reading(1, step, 1))
    server.collect(Question(1), LONG, False)
    server.close()
    began = time.monotonic()
    client.close(reading(1, 2, 2, final=True), 0.3)
    assert time.monotonic() - began < LONG


ENDPOINTS = "10.0.0.1:6000,10.0.0.1:6001,10.0.0.2:6000"


def test_any_number_of_questions_at_once_blocks_nobody(server: RankServer) -> None:
    with server._changed:  # the server cannot read what wakes it
        for _ in range(200_000):
            server._waker.wake()
    assert server.collect(Question(1), 0.1, False) == {}


def test_what_the_launcher_tells_its_workers() -> None:
    environ = {
        "PADDLE_TRAINER_ID": "2",
        "PADDLE_TRAINERS_NUM": "3",
        "PADDLE_TRAINER_ENDPOINTS": ENDPOINTS,
        "PADDLE_MASTER": "10.0.0.1:5999",
    }
    found = job_from_environment(environ)
    assert (found.rank, found.world_size, found.devices_by_node) == (2, 3, (2, 1))
    assert found.address == ("10.0.0.1", 6000)


def test_spawn_puts_its_store_on_the_endpoint_of_rank_0_so_that_of_rank_1_is_taken() -> None:
    environ = {"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "3", "PADDLE_TRAINER_ENDPOINTS": ENDPOINTS}
    assert job_from_environment(environ).address == ("10.0.0.1", 6001)


def test_a_single_process_is_a_job_of_one() -> None:
    found = job_from_environment({})
    assert (found.rank, found.world_size, found.devices_by_node, found.address) == (0, 1, (1,), None)
