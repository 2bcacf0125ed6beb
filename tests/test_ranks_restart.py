"""One rank, or rank 0, is restarted and the others are not: never a wrong sum."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlflow_tokens.clock import PHASES
from mlflow_tokens.meter import Reading
from mlflow_tokens.ranks import Question, RankClient, RankServer
from mlflow_tokens.ranks.roll import ORPHANED, Roll
from mlflow_tokens.ranks.wire import Origin, Said
from tests.ranks import LONG, job, lines_said, reading, wait_until


@pytest.fixture
def said() -> Iterator[list[str]]:
    with lines_said() as lines:
        yield lines


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def spent(rank: int, step: int, computed: int, train: float, final: bool = False) -> Reading:
    seconds = dict.fromkeys(PHASES, 0.0) | {"train": train}
    by_source = {"web": (computed, computed)}
    return Reading(rank, step, step, computed, computed, computed, seconds, final, by_source=by_source)


def roll_of(clock: Clock, ranks: int = 2) -> Roll:
    roll = Roll(range(1, ranks + 1), keeps=True, now=clock)
    roll.root = 99
    return roll


def test_a_rank_restarted_alone_has_its_seconds_and_no_tokens(said: list[str]) -> None:
    clock = Clock()
    roll = roll_of(clock)
    roll.connect("first", [Origin(1, 7, 1, 0)])
    roll.connect("other", [Origin(2, 8, 1, 0)])
    roll.take(0, [Said(1, spent(1, 50, 500, train=100.0)), Said(1, spent(2, 50, 500, train=100.0))])
    roll.disconnect("first", relay=False)
    assert roll.newest()[1].computed == 500
    # 60 s later its next process has trained for 20 s: in between, its device was held for 40 s.
    clock.time += 60.0
    roll.connect("second", [Origin(1, 9, 1, 99)])
    roll.take(0, [Said(1, spent(1, 2, 20, train=20.0))])
    now = roll.newest()[1]
    assert (now.computed, now.valid, now.trained, now.skipped, now.routed) == (None,) * 5
    assert now.by_source == {"web": (None, None)}
    assert now.seconds == dict.fromkeys(PHASES, 0.0) | {"train": 120.0, "restart": 40.0}
    clock.time += 30.0
    roll.take(0, [Said(2, spent(1, 5, 50, train=50.0))])
    assert sum(roll.newest()[1].seconds.values()) == 190.0
    assert roll.newest()[2].computed == 500
    (line,) = said
    assert line.startswith("Rank 1 was restarted, and the others were not: tokens of the job are unknown")


def test_what_the_process_before_still_says_does_not_count(said: list[str]) -> None:
    roll = roll_of(Clock())
    assert roll.connect("first", [Origin(1, 7, 1, 0)]) == {1}
    roll.take(0, [Said(1, spent(1, 50, 500, train=1.0))])
    assert roll.connect("second", [Origin(1, 9, 1, 0)]) == {1}
    roll.take(0, [Said(1, spent(1, 2, 20, train=1.0))])
    assert roll.connect("again", [Origin(1, 7, 1, 0)]) == set()
    assert roll.newest()[1].step == 2
    assert len(said) == 1


def test_a_rank_restarted_after_its_last_word_goes_on_from_that() -> None:
    roll = roll_of(clock := Clock())
    roll.connect("first", [Origin(1, 7, 1, 0)])
    roll.take(0, [Said(1, spent(1, 50, 500, train=100.0, final=True))])
    roll.take(0, [Said(2, spent(1, 40, 400, train=80.0))])  # in answer to a question about a step before
    assert roll.newest()[1].computed == 500
    clock.time += 10.0
    roll.connect("second", [Origin(1, 9, 1, 0)])
    roll.take(0, [Said(1, spent(1, 2, 20, train=10.0))])
    assert roll.newest()[1].seconds["train"] == 110.0
    assert roll.newest()[1].computed is None


def test_a_script_s_next_tracker_is_not_counted_before_rank_0_has_its_next_one(said: list[str]) -> None:
    roll = roll_of(Clock())
    roll.connect("first", [Origin(1, 7, 1, 0)])
    roll.take(0, [Said(1, spent(1, 50, 500, train=1.0, final=True))])
    assert roll.connect("next", [Origin(1, 7, 2, 0)]) == set()
    assert roll.newest()[1].computed == 500
    assert said == []


def test_a_reading_that_is_older_than_another_does_not_count() -> None:
    """The first rank of a node may hand on what its rank has meanwhile said better itself."""
    roll = roll_of(Clock())
    roll.connect("relay", [Origin(1, 7, 1, 0), Origin(2, 8, 1, 0)])
    roll.connect("itself", [Origin(1, 7, 1, 99)])
    roll.take(0, [Said(5, spent(1, 50, 500, train=1.0))])
    roll.take(0, [Said(4, spent(1, 40, 400, train=1.0))])
    assert roll.newest()[1].computed == 500


def test_a_rank_whose_relay_is_gone_is_waited_for_a_moment() -> None:
    roll = roll_of(clock := Clock())
    roll.connect("relay", [Origin(1, 7, 1, 0), Origin(2, 8, 1, 0)])
    roll.take(0, [Said(1, spent(rank, 1, 10, train=1.0)) for rank in (1, 2)])
    roll.ask(Question(2), wait_for_absent=False)
    roll.disconnect("relay", relay=True)
    assert roll.waiting == {1, 2}
    assert roll.orphaned_until() == clock.time + ORPHANED
    roll.connect("itself", [Origin(2, 8, 1, 99)])
    clock.time += ORPHANED
    assert roll.orphaned_until() is None
    assert roll.waiting == {2}
    roll.disconnect("itself", relay=False)
    assert roll.waiting == set()


def test_a_rank_that_another_rank_0_has_heard_is_not_counted_by_its_next_process(said: list[str]) -> None:
    """Its totals began before this rank 0 did, which has what came before from the journal."""
    first = RankServer(job(0, 3), ("127.0.0.1", 0))
    address = first.address
    old = RankClient(job(1, 3), address, lambda step, live: reading(1, step, 10))
    wait_until(lambda: 1 in first.collect(Question(5), 0.2, False))
    first.close()
    second = RankServer(job(0, 3), address)
    fresh = RankClient(job(2, 3), address, lambda step, live: reading(2, step, 20))
    wait_until(lambda: bool(said))
    assert set(second.collect(Question(6), 0.5, False)) <= {2}
    assert said == [
        "Rank 1 reported to another rank 0 before: its totals are not those of this run, and are not taken. "
        "Restart all ranks together."
    ]
    for one in (old, fresh):
        one.over = True
    second.close()


def test_a_script_s_next_tracker_reports_to_rank_0_s_next_one(said: list[str]) -> None:
    """Rank 1 is through with the first one while rank 0 is not."""
    first = RankServer(job(0, 2), ("127.0.0.1", 0))
    address = first.address
    one = RankClient(job(1, 2), address, lambda step, live: reading(1, step, 10))
    wait_until(lambda: 1 in first.collect(Question(5), 0.2, False))
    assert one.close(reading(1, 9, 90, final=True), LONG)
    two = RankClient(job(1, 2), address, lambda step, live: reading(1, step, 7))
    assert first.collect(Question(9, live=True, last=True), LONG, True)[1].computed == 90
    first.close()
    second = RankServer(job(0, 2), address)
    assert second.collect(Question(3), LONG, True) == {1: reading(1, 3, 7)}
    two.over = True
    second.close()
    assert said == []
