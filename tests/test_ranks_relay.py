"""A node's first rank relays for the others there; addresses of loopback stand for nodes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mlflow_tokens.meter import Reading
from mlflow_tokens.ranks import Job, Question, RankClient, RankServer, Relay, client, relay_of, talk
from tests.ranks import LONG, jobs, reading, wait_until

Read = Callable[[int, bool], Reading | None]


class Team:
    """Rank 0's server, and clients of the ranks that are told to join; it closes what is left."""

    def __init__(self, *nodes: int) -> None:
        self.jobs = jobs(*nodes)
        assert self.jobs[0].address is not None
        self.server = RankServer(self.jobs[0], self.jobs[0].address)
        self.clients: dict[int, RankClient] = {}

    def join(self, rank: int, read: Read | None = None, *, relays: bool = True) -> RankClient:
        job = self.jobs[rank]
        assert job.address is not None
        read = read or (lambda step, live: reading(rank, step, 100 * rank + step))
        self.clients[rank] = RankClient(job, job.address, read, relay_of(job) if relays else None)
        return self.clients[rank]

    def at(self, step: int, timeout: float = LONG) -> dict[int, tuple[int, int | None]]:
        """Step and tokens of each rank, asked for a step."""
        found = self.server.collect(Question(step), timeout, True)
        return {rank: (one.step, one.computed) for rank, one in sorted(found.items())}

    def connections(self) -> int:
        return len(self.server._peers)

    def kill(self, rank: int) -> None:
        """End a rank without a word."""
        self.clients[rank].over = True
        self.clients[rank].waker.wake()
        self.clients[rank]._thread.join(LONG)


@pytest.fixture
def team() -> Iterator[Team]:
    team = Team(2, 3, 2)
    yield team
    for one in team.clients.values():
        one.over = True
        one.waker.wake()
    team.server.close()


def exact(step: int) -> dict[int, tuple[int, int | None]]:
    return {rank: (step, 100 * rank + step) for rank in range(1, 7)}


def test_who_relays_for_whom() -> None:
    found = jobs(2, 3, 1)
    assert [job.relayed for job in found] == [(), (), (3, 4), (), (), ()]
    assert [job.relay is not None for job in found] == [False, False, True, True, True, False]
    assert found[2].relay == found[3].relay == found[4].relay


def test_the_totals_of_a_step_are_exact_over_one_connection_a_node(team: Team) -> None:
    for rank in range(1, 7):
        team.join(rank)
    for step in (10, 20, 30):
        assert team.at(step) == exact(step)
    assert team.connections() == 3  # of rank 1, and of ranks 2 and 5, which relay


def test_a_rank_that_is_behind_holds_up_its_node_once(team: Team) -> None:
    late = threading.Event()

    def read(step: int, live: bool) -> Reading | None:
        return reading(4, step, 400 + step) if late.is_set() else reading(4, 3, 3) if live else None

    for rank in (1, 2, 3, 5, 6):
        team.join(rank)
    team.join(4, read)
    assert team.at(10) == exact(10) | {4: (3, 3)}
    began = time.monotonic()
    assert team.at(20) == exact(20) | {4: (3, 3)}
    assert time.monotonic() - began < 3  # it takes 4 s to lose its patience
    late.set()
    wait_until(lambda: team.at(30) == exact(30))


def test_when_the_first_rank_of_a_node_dies_the_others_reach_rank_0_themselves(team: Team) -> None:
    for rank in range(1, 7):
        team.join(rank)
    assert team.at(10) == exact(10)
    team.kill(2)
    assert team.at(20) == exact(20) | {2: (10, 210)}
    assert team.connections() == 4


def test_a_rank_that_is_restarted_behind_its_first_one_has_no_tokens(team: Team) -> None:
    for rank in range(1, 7):
        team.join(rank)
    assert team.at(10) == exact(10)
    team.kill(3)
    job = team.jobs[3]
    assert job.address is not None
    team.clients[3] = RankClient(job, job.address, lambda step, live: reading(3, step, 5), process=77)
    wait_until(lambda: team.at(20) == exact(20) | {3: (20, None)})
    assert team.connections() == 3


def test_a_first_rank_with_fewer_batches_ends_before_the_others(team: Team) -> None:
    for rank in range(1, 7):
        team.join(rank)
    assert team.at(10) == exact(10)
    assert team.clients[2].close(reading(2, 15, 999, final=True), LONG)
    assert team.at(20) == exact(20) | {2: (15, 999)}
    assert team.at(12)[2] == (15, 999)  # it is gone


def test_the_last_of_all_ranks_is_heard_through_the_first_one(team: Team) -> None:
    for rank in range(1, 7):
        team.join(rank)
    assert team.at(10) == exact(10)
    taken: dict[int, bool] = {}

    def leave(rank: int) -> None:
        taken[rank] = team.clients[rank].close(reading(rank, 12, 7 * rank, final=True), LONG)

    leaving = [threading.Thread(target=leave, args=[rank]) for rank in range(1, 7)]
    for thread in leaving:
        thread.start()
    last = team.server.collect(Question(12, live=True, last=True), LONG, True)
    for thread in leaving:
        thread.join()
    assert {rank: one.computed for rank, one in last.items()} == {rank: 7 * rank for rank in range(1, 7)}
    assert taken == dict.fromkeys(range(1, 7), True)


def test_a_rank_that_has_said_its_last_still_answers_for_a_step_before(team: Team) -> None:
    for rank in (1, 2, 3, 5, 6):
        team.join(rank)

    def read(step: int, live: bool) -> Reading | None:
        time.sleep(0.2 * (step == 20))  # a device that takes its time to be read
        return reading(4, step, 400 + step) if step <= 40 else None

    team.join(4, read)
    assert team.at(10) == exact(10)
    leaving = threading.Thread(target=team.clients[4].close, args=[reading(4, 40, 440, final=True), LONG])
    leaving.start()
    wait_until(lambda: 4 in team.server._roll.last)
    assert team.at(20) == exact(20)
    assert team.at(50) == exact(50) | {4: (40, 440)}
    leaving.join()


@pytest.mark.parametrize("there", ["nobody", "a stranger", "one who hangs"])
def test_where_the_first_rank_cannot_be_reached_the_others_reach_rank_0_themselves(
    team: Team, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_RELAY_PATIENCE", 0.2)
    monkeypatch.setattr(talk, "_WELCOME", 0.1)
    address = team.jobs[2].relay
    assert address is not None
    stranger: socket.socket | None = None
    if there != "nobody":
        stranger = socket.create_server(address)
    if there == "a stranger":
        threading.Thread(target=_greet, args=[stranger], daemon=True).start()
    for rank in range(1, 7):
        team.join(rank, relays=there != "nobody")
    assert team.at(10) == exact(10)
    assert team.connections() == (6 if there == "nobody" else 5)
    if stranger is not None:
        stranger.close()


def _greet(listening: socket.socket | None) -> None:
    while listening is not None:
        try:
            connection, _ = listening.accept()
            connection.sendall(b"220 ftp.example.com ready\r\n")
        except OSError:
            return


def test_a_first_rank_that_hands_on_nothing_does_not_keep_what_a_rank_says_last(team: Team) -> None:
    frozen: Job = team.jobs[2]
    assert frozen.relay is not None
    relay = Relay(frozen, frozen.relay)
    team.join(3)
    wait_until(lambda: bool(relay.news().origins))
    assert team.clients[3].close(reading(3, 12, 36, final=True), LONG)
    assert team.at(12, 0.1)[3] == (12, 36)
    relay.close()


def test_without_rank_0_nobody_waits_longer_than_told(team: Team) -> None:
    for rank in range(1, 7):
        team.join(rank)
    assert team.at(10) == exact(10)
    team.server.close()
    for rank in (2, 3):
        began = time.monotonic()
        assert not team.clients[rank].close(reading(rank, 12, 1, final=True), 1.2)
        assert time.monotonic() - began < 3
