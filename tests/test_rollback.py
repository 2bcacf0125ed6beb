"""What a restart from an earlier checkpoint does to tokens and money. Every figure worked out by hand.

One device at 3600 USD an hour: a second of training costs 1 USD. A step takes a second and 10 valid
tokens out of 16.
"""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal

import pytest

from mlflow_tokens.account import Account, account_of
from mlflow_tokens.ledger import replay
from mlflow_tokens.records import CarriedOver, Quantities, Record, Rollback
from tests.journals import price, quantities, segment

USD = "3600 USD/device-hour"
T0 = 1_700_000_000.0


def begin(name: str, rollback: Rollback | None = None, text: str = USD) -> list[Record]:
    return [*([rollback] if rollback else []), segment(name), price(text)]


def trained(
    name: str, begun: int, to: int, *, seq: int = 1, rewinds: int = 0, **seconds: float
) -> Quantities:
    """Quantities of a segment that began at step `begun` and has reached step `to`."""
    steps = to - begun
    return quantities(
        name,
        seq=seq,
        step=to,
        position=to,
        computed=16 * steps,
        valid=10 * steps,
        train=float(steps),
        t_wall=T0 + 1000 * rewinds + to,
        rewinds=rewinds,
        **seconds,
    )


def back(to_segment: str, to_step: int, effective: int | None = None) -> Rollback:
    return Rollback("next", 0.0, to_segment, to_step, effective)


def cells(account: Account) -> dict[tuple[str, str], int]:
    return {key: int(amount) for key, amount in account.cells.items() if amount}


CRASHED = [*begin("a"), trained("a", 0, 100), trained("a", 0, 150, seq=2)]


def test_resumed_from_100_after_a_crash_at_150() -> None:
    resumed = [*CRASHED, *begin("b", back("a", 100)), trained("b", 100, 140, seq=3, rewinds=1)]
    account = account_of(resumed)
    assert account.cost == 190
    assert (account.computed, account.valid, account.effective) == (16 * 190, 10 * 190, 10 * 140)
    assert cells(account) == {("train", "surviving"): 140, ("train", "rolled_back"): 50}
    assert account.device_seconds_total == 190
    metrics = list(replay(resumed))[-1].metrics
    assert metrics["cost/per_million_tokens"] == pytest.approx(1e6 * 190 / 1400)
    assert metrics["cost/waste/rolled_back"] == 50


def test_right_after_the_rollback_effective_is_what_it_was_at_the_checkpoint() -> None:
    account = account_of([*CRASHED, *begin("b", back("a", 100))])
    assert (account.step, account.effective, account.valid) == (100, 1000, 1500)


def test_several_rollbacks_one_after_the_other() -> None:
    records = [*CRASHED, *begin("b", back("a", 100)), trained("b", 100, 120, seq=3, rewinds=1)]
    records += [*begin("c", back("b", 120)), trained("c", 120, 130, seq=4, rewinds=2)]  # nothing lost
    records += [*begin("d", back("c", 130)), trained("d", 130, 160, seq=5, rewinds=3)]
    records += [*begin("e", back("a", 100)), trained("e", 100, 105, seq=6, rewinds=4)]  # an old one
    account = account_of(records)
    # Trained: 150 + 20 + 10 + 30 + 5 steps; of the history 100 + 5 are left.
    assert (account.cost, account.valid, account.effective) == (215, 2150, 1050)
    assert cells(account) == {("train", "surviving"): 105, ("train", "rolled_back"): 110}


def test_a_checkpoint_of_a_branch_that_had_been_given_up_counts_again() -> None:
    records = [*begin("a"), trained("a", 0, 100), trained("a", 0, 140, seq=2)]
    records += [*begin("b", back("a", 100)), trained("b", 100, 120, seq=3, rewinds=1)]
    records += [*begin("c", back("a", 140)), trained("c", 140, 150, seq=4, rewinds=2)]
    account = account_of(records)
    # a's 140 steps and c's 10 are the history; b's 20 are not.
    assert (account.cost, account.effective) == (170, 1500)
    assert cells(account) == {("train", "surviving"): 150, ("train", "rolled_back"): 20}


def test_back_to_the_beginning() -> None:
    account = account_of([*CRASHED, *begin("b", back("a", 0)), trained("b", 0, 10, seq=3, rewinds=1)])
    assert (account.cost, account.effective) == (160, 100)
    assert cells(account) == {("train", "surviving"): 10, ("train", "rolled_back"): 150}


def test_startup_and_restart_are_cells_of_their_own_and_are_never_rolled_back() -> None:
    first = [
        *begin("a"),
        trained("a", 0, 100, startup=7.0),
        trained("a", 0, 150, seq=2, startup=7.0, eval=3.0),
    ]
    second = trained("b", 100, 140, seq=3, rewinds=1, restart=9.0)
    account = account_of([*first, *begin("b", back("a", 100)), second])
    assert cells(account) == {
        ("startup", "surviving"): 7,
        ("restart", "surviving"): 9,
        ("train", "surviving"): 140,
        ("train", "rolled_back"): 50,
        ("eval", "rolled_back"): 3,
    }
    assert account.cost == 209 == sum(account.cells.values())
    metrics = list(replay([*first, *begin("b", back("a", 100)), second]))[-1].metrics
    assert "cost/phase/train" not in metrics  # at the end only


def test_the_phases_of_the_final_snapshot_add_up_to_the_total() -> None:
    final = quantities(kind="final", step=9, train=9.0, eval=4.0, startup=2.0, computed=1)
    (last,) = replay([*begin("a"), final])
    phases = {name: value for name, value in last.metrics.items() if name.startswith("cost/phase/")}
    assert phases == {"cost/phase/train": 9, "cost/phase/eval": 4, "cost/phase/startup": 2}
    assert last.metrics["cost/total"] == 15


def test_a_checkpoint_that_the_journal_does_not_hold_makes_effective_unknown_and_nothing_wrong() -> None:
    account = account_of([*CRASHED, *begin("b", back("a", 77)), trained("b", 77, 90, seq=3, rewinds=1)])
    assert (account.cost, account.valid, account.effective) == (163, 1630, None)
    metrics = list(replay([*CRASHED, *begin("b", back("a", 77)), trained("b", 77, 90, seq=3, rewinds=1)]))[-1]
    assert "cost/waste/rolled_back" not in metrics.metrics
    assert "cost/per_million_tokens" not in {k for k, v in metrics.metrics.items() if not math.isnan(v)}


def test_what_history_knows_of_the_checkpoint_is_taken_where_the_journal_does_not_hold_it() -> None:
    records = [*CRASHED, *begin("b", back("a", 77, effective=770)), trained("b", 77, 90, seq=3, rewinds=1)]
    account = account_of(records)
    assert (account.cost, account.effective) == (163, 900)


def test_a_rollback_record_that_was_damaged_makes_totals_unknown_and_not_wrong() -> None:
    account = account_of([*CRASHED, *begin("b"), trained("b", 100, 140, seq=3, rewinds=1)])
    assert (account.computed, account.effective, account.cost) == (None, None, None)


CARRIED = CarriedOver(
    from_run="parent",
    from_segment="a",
    from_step=100,
    source="journal",
    position=100,
    high_water=0,
    elapsed=100.0,
    busy=100.0,
    tokens={"computed": 1600, "valid": 1000, "effective": 900},
    seconds={"cpu-worker": {"train": 100.0}},
    currency="USD",
    cells=(("train", "surviving", Decimal(90)), ("train", "rolled_back", Decimal(10))),
)


def test_a_run_that_carries_on_from_its_parent() -> None:
    account = account_of([CARRIED, *begin("b"), trained("b", 100, 140, rewinds=1)])
    assert (account.cost, account.computed, account.effective) == (140, 16 * 140, 900 + 400)
    assert cells(account) == {("train", "surviving"): 130, ("train", "rolled_back"): 10}
    # And back to the parent's checkpoint once more.
    again = [CARRIED, *begin("b"), trained("b", 100, 140, rewinds=1), *begin("c", back("a", 100))]
    assert account_of([*again, trained("c", 100, 110, seq=2, rewinds=2)]).effective == 900 + 100


def test_a_run_that_carries_on_in_another_currency_has_no_cost() -> None:
    account = account_of([CARRIED, *begin("b", text="1 CNY/device-hour"), trained("b", 100, 140, rewinds=1)])
    assert account.cost is None
    assert account.computed == 16 * 140


def test_below_the_high_water_step_totals_are_logged_there_and_rates_where_they_are() -> None:
    records = [*CRASHED, *begin("b", back("a", 100))]
    records += [trained("b", 100, step, seq=step, rewinds=1) for step in (101, 149, 150, 160)]
    points = [dict(snapshot.points()) for snapshot in replay(records)]
    effective = [
        (position, value)
        for at in points
        for (name, position, _), value in at.items()
        if name == "tokens/effective"
    ]
    assert effective == [(100, 1000), (150, 1500), (150, 1010), (150, 1490), (150, 1500), (160, 1600)]
    rates = [position for at in points for name, position, _ in at if name == "throughput/tokens_per_second"]
    assert rates == [100, 150, 101, 149, 150, 160]


def test_the_end_of_a_run_that_never_comes_back_up_is_its_latest() -> None:
    records = [*CRASHED, *begin("b", back("a", 100)), trained("b", 100, 110, seq=3, rewinds=1)]
    final = quantities(
        "b", seq=4, kind="final", step=112, position=112, train=12.0, computed=192, valid=120, rewinds=1
    )
    last = list(replay([*records, final]))[-1]
    assert last.position == 112
    points = {point: value for point, value in last.points() if point[1] == 150}
    assert points["tokens/effective", 150, last.timestamp_ms] == 1120
    assert points["cost/phase/train", 150, last.timestamp_ms] == 150 + 12


UNKNOWN = CarriedOver(
    from_run="r",
    from_segment="a",
    from_step=100,
    source="unknown",
    position=100,
    high_water=100,
    elapsed=0.0,
    busy=0.0,
    tokens={},
    seconds={},
)


@pytest.mark.parametrize("priced", [True, False])
def test_series_of_a_run_whose_past_is_unknown_are_ended_once(priced: bool) -> None:
    head = begin("b") if priced else [segment("b")]
    first, second = replay(
        [UNKNOWN, *head, trained("b", 100, 110, rewinds=1), trained("b", 100, 120, seq=2, rewinds=1)]
    )
    ended = {name for name, value in first.metrics.items() if math.isnan(value)}
    assert {"tokens/computed", "tokens/valid", "tokens/effective", "device/hours"} <= ended
    assert ("cost/total" in ended) == priced
    assert not any(math.isnan(value) for value in second.metrics.values())


def test_a_total_that_only_a_checkpoint_has_logged_is_ended_when_it_is_unknown() -> None:
    """Killed after a checkpoint at step 1; resumed from one at step 5 that did not reach the journal."""
    checkpoint = replace(trained("a", 0, 1), kind="checkpoint")
    resumed = [*begin("a"), checkpoint, *begin("b", back("a", 5)), trained("b", 5, 9, seq=2, rewinds=1)]
    first, last = [snapshot.metrics for snapshot in replay(resumed)]
    assert first["tokens/effective"] == 10
    assert math.isnan(last["tokens/effective"])


def test_the_cost_of_a_run_that_goes_on_without_a_price_is_ended() -> None:
    last = list(replay([*CRASHED, segment("b"), trained("b", 150, 160, seq=3)]))[-1]
    assert math.isnan(last.metrics["cost/total"])
    assert last.metrics["tokens/computed"] == 16 * 160


def test_recent_rates_after_a_rollback_are_those_of_the_new_segment() -> None:
    records = [*CRASHED, *begin("b", back("a", 100)), trained("b", 100, 110, seq=3, rewinds=1)]
    metrics = list(replay(records))[-1].metrics
    assert metrics["throughput/tokens_per_second"] == 16
    assert metrics["cost/per_million_tokens_recent"] == pytest.approx(1e6 * 10 / 100)


def test_eight_ranks_then_four_then_sixteen_each_at_its_price() -> None:
    def held(name: str, ranks: int, seq: int, seconds: float, tokens: int) -> Quantities:
        return quantities(
            name,
            ranks=ranks,
            seq=seq,
            step=10 * seq,
            position=10 * seq,
            computed=tokens,
            valid=tokens,
            train=ranks * seconds,
            t_wall=T0 + seq,
        )

    records: list[Record] = [segment("a", (8,)), price("3600 USD/device-hour"), held("a", 8, 1, 10.0, 8000)]
    records += [segment("b", (4,)), price("7200 USD/device-hour"), held("b", 4, 2, 10.0, 4000)]
    records += [segment("c", (8, 8)), price("57600 USD/instance-hour x8"), held("c", 16, 3, 5.0, 6000)]
    account = account_of(records)
    assert (account.computed, account.effective) == (18_000, 18_000)
    assert account.device_seconds_total == 8 * 10 + 4 * 10 + 16 * 5
    # 80 device-seconds at 1 USD, 40 at 2, 5 s of two instances at 16 USD a second each.
    assert account.cost == 80 + 80 + 160
    metrics = list(replay(records))[-1].metrics
    # 18,000 tokens in 25 s of wall time, and in 200 device-seconds.
    assert metrics["throughput/tokens_per_second_average"] == pytest.approx(18_000 / 25)
    assert metrics["throughput/tokens_per_second_per_device_average"] == pytest.approx(18_000 / 200)


def gap(*, same_allocation: bool = False, bill_gaps: bool = False, boot: str = "") -> Account:
    """10 s of training on 2 devices; 60 s later by both clocks, 10 s on 1 device, after 4 s of restart."""
    allocation = "slurm:1" if same_allocation else ""
    return account_of(
        [
            segment("a", (2,), allocation=allocation, boot=boot),
            price(USD),
            quantities("a", ranks=2, seq=1, train=20.0, t_wall=T0, t_mono=500.0, elapsed=10.0),
            segment("b", (1,), allocation=allocation, bill_gaps=bill_gaps, boot=boot),
            price(USD),
            quantities("b", seq=2, restart=4.0, train=10.0, t_wall=T0 + 74, t_mono=574.0),
        ]
    )


@pytest.mark.parametrize(("same_allocation", "bill_gaps"), [(True, False), (False, True)])
def test_a_gap_in_which_the_machines_were_held_is_billed_as_restart(
    same_allocation: bool, bill_gaps: bool
) -> None:
    account = gap(same_allocation=same_allocation, bill_gaps=bill_gaps)
    # 60 s of the two devices that were held until then.
    assert cells(account) == {("train", "surviving"): 30, ("restart", "surviving"): 124}
    assert (account.cost, account.gap_seconds, account.elapsed) == (154, 0, 84)


def test_a_gap_between_two_allocations_is_shown_and_not_billed() -> None:
    account = gap()
    assert (account.cost, account.gap_seconds, account.device_seconds_total) == (34, 120, 34)


def test_a_gap_is_measured_by_the_clock_that_never_jumps_where_the_machine_is_the_same() -> None:
    records = [
        segment("a", boot="x", bill_gaps=True),
        price(USD),
        quantities("a", train=1.0, t_wall=T0, t_mono=500.0),
        segment("b", boot="x", bill_gaps=True),
        price(USD),
        # The time of day was set back by an hour; 20 s have gone by.
        quantities("b", seq=2, train=1.0, t_wall=T0 - 3580, t_mono=521.0),
    ]
    assert account_of(records).cost == 22
