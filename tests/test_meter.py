"""One rank's totals: steps, unfinished steps, unknowns."""

from __future__ import annotations

from mlflow_tokens.clock import PhaseClock
from mlflow_tokens.counting import BatchCounts
from mlflow_tokens.meter import HISTORY, Meter


def batch(computed: int, valid: int | None = None, trained: int | None = None) -> BatchCounts:
    return BatchCounts(computed, valid, trained, frozenset({computed}))


def totals(meter: Meter, step: int) -> tuple[int | None, int | None, int | None] | None:
    reading = meter.reading(step)
    return reading and (reading.computed, reading.valid, reading.trained)


def test_totals_are_those_at_the_end_of_each_step() -> None:
    meter = Meter(0, PhaseClock())
    for _ in range(3):
        for _ in range(8):  # accumulation: 8 micro-batches a step, not 1 and not the last one
            meter.count(batch(100, 60, 50))
        meter.step()
    meter.count(batch(100, 60, 50))  # of a step that has not ended
    assert [totals(meter, step) for step in range(5)] == [
        (0, 0, 0),
        (800, 480, 400),
        (1600, 960, 800),
        (2400, 1440, 1200),
        None,
    ]
    assert meter.in_step
    live = meter.reading(live=True)
    assert live is not None and (live.step, live.computed, live.micro_batches) == (3, 2400, 24)


def test_the_last_partial_batch_counts_what_it_holds() -> None:
    meter = Meter(0, PhaseClock())
    for rows in (4, 4, 2):  # 10 samples at batch 4 are 10
        meter.count(batch(rows, rows, rows))
        meter.step()
    assert totals(meter, 3) == (10, 10, 10)


def test_a_total_once_unknown_stays_unknown() -> None:
    meter = Meter(0, PhaseClock())
    for valid in (10, None, 10):
        meter.count(batch(16, valid, 5))
        meter.step()
    assert [totals(meter, step) for step in (1, 2, 3)] == [(16, 10, 5), (32, None, 10), (48, None, 15)]


def test_labels_seen_by_the_loss_belong_to_the_newest_micro_batch() -> None:
    meter = Meter(0, PhaseClock())
    meter.count(batch(16, 16))
    assert not meter.awaits_labels(4)  # a class a row
    assert meter.awaits_labels(16)
    meter.count_labels(9)
    assert not meter.awaits_labels(16)  # a second loss over the same tokens
    meter.step()
    assert totals(meter, 1) == (16, 16, 9)


def test_a_micro_batch_whose_labels_nobody_saw_makes_trained_unknown() -> None:
    meter = Meter(0, PhaseClock())
    meter.count(batch(16, 16))
    meter.count(batch(16, 16))
    meter.count_labels(9)
    meter.step()
    assert totals(meter, 1) == (32, 32, None)


def test_counts_beyond_32_bits() -> None:
    meter = Meter(0, PhaseClock())
    for _ in range(3):
        meter.count(batch(2**31, 2**31, 2**31))
    meter.step()
    assert totals(meter, 1) == (3 * 2**31,) * 3


def test_old_steps_are_answered_with_the_oldest_one_known() -> None:
    meter = Meter(0, PhaseClock())
    for _ in range(HISTORY + 10):
        meter.count(batch(1, 1, 1))
        meter.step()
    reading = meter.reading(1)
    assert reading is not None
    assert reading.step == reading.computed == 11


def test_a_step_that_is_left_out_is_no_step_and_its_tokens_are_not_effective() -> None:
    meter = Meter(0, PhaseClock())
    meter.count(BatchCounts(10, 8, 7))
    meter.step()
    meter.count(BatchCounts(10, 6, 5))
    meter.count(BatchCounts(10, 5, 4))
    assert meter.in_step
    meter.skip_step()
    assert not meter.in_step
    now = meter.reading(live=True)
    assert now is not None
    assert (now.step, now.computed, now.valid, now.trained, now.skipped) == (1, 30, 19, 16, 11)
    before = meter.reading(1)
    assert before is not None
    assert (before.computed, before.skipped) == (10, 0)
    meter.count(BatchCounts(10, 4, 3))
    meter.step()
    after = meter.reading(2)
    assert after is not None
    assert (after.step, after.computed, after.valid, after.skipped) == (2, 40, 23, 11)


def test_what_a_skipped_step_lost_is_unknown_where_its_tokens_are() -> None:
    meter = Meter(0, PhaseClock())
    meter.count(BatchCounts(10, None, None))
    meter.skip_step()
    now = meter.reading(live=True)
    assert now is not None
    assert (now.computed, now.valid, now.skipped) == (10, None, None)


def test_micro_batches_of_a_skipped_step_are_not_dropped_at_the_end() -> None:
    meter = Meter(0, PhaseClock())
    meter.count(BatchCounts(10, 8, 7))
    meter.skip_step()
    meter.count(BatchCounts(10, 8, 7))
    meter.drop_unfinished_step()
    now = meter.reading(live=True)
    assert now is not None
    assert (now.computed, now.skipped) == (10, 8)


def test_routed_tokens_add_up_until_a_gate_says_nothing() -> None:
    meter = Meter(0, PhaseClock())
    for routed, total in ((32, 32), (16, 48), (None, None), (8, None)):
        meter.count(BatchCounts(16, 16, 16))
        meter.count_routed(routed)
        meter.step()
        now = meter.reading(live=True)
        assert now is not None
        assert now.routed == total
