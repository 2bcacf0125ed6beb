"""The account as a fold, and the metrics that follow from it: figures worked out by hand."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_tokens.account import Account, account_of
from mlflow_tokens.metrics import HEARTBEAT_METRICS, METRICS
from mlflow_tokens.records import CarriedOver
from mlflow_tokens.snapshot import derive
from tests.journals import price, quantities, segment


def test_10_s_of_training_and_60_s_of_evaluation() -> None:
    now = account_of([segment(), quantities(train=10.0, eval=60.0, computed=1_600_000, valid=1_000_000)])
    metrics = derive(now, Account(), "step").metrics
    assert metrics["throughput/tokens_per_second"] == pytest.approx(160_000)
    assert metrics["throughput/valid_tokens_per_second"] == pytest.approx(100_000)
    assert metrics["throughput/tokens_per_second_wall"] == pytest.approx(1_600_000 / 70)  # 22.9 k


def test_100_m_tokens_at_48_m_tokens_an_hour_at_1_85_usd_an_hour() -> None:
    seconds = 100 / 48 * 3600  # 7,500
    now = account_of(
        [segment(), price("1.85 USD/device-hour"), quantities(train=seconds, computed=10**8, valid=10**8)]
    )
    assert now.cost is not None
    assert round(now.cost, 12) == round(Decimal("1.85") * 100 / 48, 12)  # 3.854166…
    metrics = derive(now, Account(), "step").metrics
    assert metrics["cost/total"] == pytest.approx(3.854166666667, rel=1e-12)
    assert metrics["cost/per_million_tokens"] == pytest.approx(0.03854166666667, rel=1e-12)


def test_an_instance_is_billed_whole() -> None:
    six_devices_for_an_hour = quantities(train=6 * 3600.0, ranks=6, computed=1, device_type="A100")
    now = account_of(
        [segment("a", (6,), "A100"), price("98.32 USD/instance-hour x8"), six_devices_for_an_hour]
    )
    assert now.cost is not None
    assert round(now.cost, 10) == Decimal("98.32")


def test_device_time_is_summed_over_ranks_and_the_rate_divides_by_wall_time() -> None:
    # Two ranks train 5 s each: 1,000 tokens in 5 s of wall time are 200 a second, 100 a device.
    now = account_of([segment("a", (2,)), quantities(train=10.0, ranks=2, computed=1000, valid=900)])
    metrics = derive(now, Account(), "step").metrics
    assert metrics["throughput/tokens_per_second"] == pytest.approx(200)
    assert metrics["throughput/tokens_per_second_per_device"] == pytest.approx(100)
    assert metrics["device/hours"] == pytest.approx(10 / 3600)


def test_recent_figures_are_of_the_window_alone() -> None:
    head = [segment(), price("3.6 USD/device-hour")]  # 0.001 USD a second
    first = quantities(seq=1, train=10.0, computed=1000, valid=1000)
    second = quantities(seq=2, step=20, train=12.0, eval=8.0, computed=2000, valid=1500)
    metrics = derive(account_of([*head, first, second]), account_of([*head, first]), "step").metrics
    assert metrics["throughput/tokens_per_second"] == pytest.approx(1000 / 2)
    assert metrics["throughput/tokens_per_second_average"] == pytest.approx(2000 / 12)
    # The window took 10 s (2 of training, 8 of evaluation): 0.01 USD for 500 valid tokens.
    assert metrics["cost/per_million_tokens_recent"] == pytest.approx(0.01 / 500 * 1e6)
    assert metrics["cost/per_million_tokens"] == pytest.approx(0.02 / 1500 * 1e6)
    assert metrics["cost/per_million_computed_tokens"] == pytest.approx(0.02 / 2000 * 1e6)


def test_what_is_unknown_is_absent() -> None:
    no_price = derive(account_of([segment(), quantities(train=1.0, computed=5)]), Account(), "step").metrics
    assert not [name for name in no_price if name.startswith("cost/")]
    assert "tokens/valid" not in no_price and "tokens/trained" not in no_price
    no_tokens = derive(
        account_of([segment(), price("1 USD/device-hour"), quantities(train=1.0)]), Account(), "step"
    )
    assert set(no_tokens.metrics) == {"cost/total", "device/hours"}
    unknown_valid = account_of([segment(), price("1 USD/device-hour"), quantities(train=1.0, computed=5)])
    metrics = derive(unknown_valid, Account(), "step").metrics
    assert "cost/per_million_tokens" not in metrics
    assert metrics["cost/per_million_computed_tokens"] == pytest.approx(1 / 3600 / 5 * 1e6)


def test_a_price_that_comes_late_does_not_make_the_time_before_it_free() -> None:
    late = [segment(), quantities(seq=1, train=5.0), price("1 USD/device-hour"), quantities(seq=2, train=9.0)]
    assert account_of(late).cost is None


def test_a_price_that_changes_is_charged_from_there_on() -> None:
    now = account_of(
        [
            segment(),
            price("3.6 USD/device-hour"),
            quantities(seq=1, train=3600.0),
            price("1.2 USD/device-hour"),
            quantities(seq=2, train=3 * 3600.0),
        ]
    )
    assert now.cost is not None
    assert round(now.cost, 12) == Decimal("3.6") + 2 * Decimal("1.2")


def test_prices_of_two_currencies_are_not_added_up() -> None:
    mixed = [segment(), price("1 USD/device-hour"), quantities(train=1.0), price("1 CNY/device-hour")]
    assert account_of(mixed).cost is None


def test_a_second_segment_adds_to_the_first() -> None:
    now = account_of(
        [
            segment("a"),
            price("3.6 USD/device-hour"),
            quantities("a", startup=10.0, train=20.0, computed=1000, valid=800, trained=700),
            segment("b", (2,)),
            price("3.6 USD/device-hour"),
            quantities("b", seq=2, ranks=2, startup=4.0, train=6.0, computed=100, valid=90, trained=80),
        ]
    )
    assert (now.computed, now.valid, now.trained, now.effective) == (1100, 890, 780, 890)
    assert now.seconds_in("train") == pytest.approx(26.0)
    assert now.elapsed == pytest.approx(35.0)  # 30 s on one rank, 5 s on two
    assert now.cells == {
        ("startup", "surviving"): pytest.approx(Decimal("0.014")),
        ("train", "surviving"): pytest.approx(Decimal("0.026")),
    }


def test_a_segment_whose_price_is_not_said_is_not_charged_at_the_last_one() -> None:
    first = [segment("a"), price("3.6 USD/device-hour"), quantities("a", train=20.0)]
    assert account_of(first).cost is not None
    assert account_of([*first, segment("b"), quantities("b", seq=2, train=5.0)]).cost is None


def test_time_that_turns_out_to_be_evaluation_moves_its_money_too() -> None:
    now = account_of(
        [
            segment(),
            price("3.6 USD/device-hour"),
            quantities(seq=1, kind="heartbeat", train=70.0),
            quantities(seq=2, train=10.0, eval=61.0),
        ]
    )
    assert now.cells[("train", "surviving")] == pytest.approx(Decimal("0.010"))
    assert now.cells[("eval", "surviving")] == pytest.approx(Decimal("0.061"))


@given(st.lists(st.tuples(*[st.floats(0, 1e6)] * 3), min_size=1, max_size=30))
def test_the_cells_add_up_to_the_total_exactly(growth: list[tuple[float, float, float]]) -> None:
    seconds, records = [0.0, 0.0, 0.0], [segment("a", (6,)), price("98.32 USD/instance-hour x8")]
    for seq, more in enumerate(growth):
        seconds = [round(before + part, 6) for before, part in zip(seconds, more, strict=True)]
        records.append(quantities(seq=seq, ranks=6, startup=seconds[0], train=seconds[1], eval=seconds[2]))
    now = account_of(records)
    assert now.cost == sum(now.cells.values(), Decimal(0))
    held = Decimal(str(seconds[0])) + Decimal(str(seconds[1])) + Decimal(str(seconds[2]))
    assert float(now.cost or 0) == pytest.approx(
        float(held / 3600 / 6 * Decimal("98.32")), rel=1e-9, abs=1e-9
    )


def test_counts_beyond_32_bits_and_beyond_a_double_survive() -> None:
    assert account_of([segment(), quantities(train=1.0, computed=10_251_184_259)]).computed == 10_251_184_259
    exact = derive(account_of([segment(), quantities(train=1.0, computed=2**53 + 1)]), Account(), "step")
    assert exact.counts["tokens/computed"] == 2**53 + 1


def test_no_gap_is_charged_after_totals_that_go_beyond_the_journal() -> None:
    """Until when MLflow's history goes is not known; what it has of the gap would be billed twice."""
    carried = CarriedOver(
        "run", "a", 20, "history", 20, 20, 30.0, 30.0, {"computed": 300, "valid": 300, "effective": 300},
        {"cpu-worker": {"train": 30.0}}, "USD", (("train", "surviving", Decimal(30)),),
    )  # fmt: skip
    held = {"allocation": "node", "boot": "boot"}
    account = account_of(
        [
            segment("a", **held),
            price("3600 USD/device-hour"),
            quantities("a", train=10.0, t_mono=10.0, computed=100, valid=100),
            carried,
            segment("b", **held),
            price("3600 USD/device-hour"),
            quantities("b", train=5.0, t_mono=100.0, computed=50, valid=50, rewinds=1),
        ]
    )
    assert account.cost == 35
    assert (account.device_seconds_total, account.gap_seconds, account.computed) == (35.0, 0.0, 350)


def test_tokens_of_a_segment_whose_start_is_damaged_count_and_its_cost_is_unknown() -> None:
    account = account_of(
        [
            segment("a"),
            price("3600 USD/device-hour"),
            quantities("a", computed=5, valid=4, train=2.0),
            quantities("b", computed=7, valid=6, train=1.0, t_wall=1_700_000_001.0),
        ]
    )
    assert (account.computed, account.valid, account.trained) == (12, 10, None)
    assert account.device_seconds_total == 3.0
    assert account.cost is None


def test_a_heartbeat_logs_what_grows_while_nothing_is_trained() -> None:
    now = account_of(
        [segment(), price("2 USD/device-hour"), quantities(kind="heartbeat", train=9.0, computed=5)]
    )
    assert set(derive(now, Account(), "heartbeat").metrics) == set(HEARTBEAT_METRICS)


def test_the_end_of_a_run_that_trained_nothing_since_repeats_no_rate() -> None:
    now = account_of([segment(), quantities(train=9.0, computed=5, valid=5)])
    assert "throughput/tokens_per_second" not in derive(now, now, "final").metrics
    assert derive(now, now, "final").metrics["tokens/computed"] == 5


def test_every_metric_that_is_logged_is_in_the_list_with_a_name_mlflow_takes() -> None:
    from mlflow.utils.validation import _validate_metric_name

    names = [spec.name for spec in METRICS]
    assert len(names) == len(set(names))
    for name in names:
        _validate_metric_name(name.replace("<", "").replace(">", ""))
    head = [segment(), price("2 USD/device-hour")]
    everything = account_of([*head, quantities(train=9.0, computed=5, valid=5, trained=5)])
    # Logged once there is a rollback, a gap, a skipped step, a gate.
    rare = {"cost/waste/rolled_back", "device/gap_hours", "tokens/skipped", "tokens/routed"}
    logged = {spec.name for spec in METRICS if spec.logged == "snapshot"} - rare
    assert set(derive(everything, account_of(head), "step").metrics) == logged
    assert set(derive(everything, account_of(head), "final").metrics) == logged | {
        "cost/phase/train",
        "tokens/valid_ratio",
    }
