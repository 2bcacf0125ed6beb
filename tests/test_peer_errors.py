"""What other trackers were found to get wrong in counting, case by case, each with its figures.

Padding, a default pad id of 0 and masked prompts are in test_counting; evaluation in the rate, whole
instances and unknown prices in test_account; one tracker a rank and unequal batches in test_distributed;
steps that a crash has billed twice in test_rollback.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import paddle
import pytest

import mlflow_tokens
from mlflow_tokens.account import Account, account_of
from mlflow_tokens.clock import PhaseClock
from mlflow_tokens.counting import PadPolicy, count_batch, find_fields
from mlflow_tokens.ledger import replay
from mlflow_tokens.meter import Meter
from mlflow_tokens.records import Record
from mlflow_tokens.snapshot import derive
from tests.conftest import Stored
from tests.journals import price, quantities, segment
from tests.loops import PAD, dataset, outside, train


def test_eight_micro_batches_a_step_are_not_one(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    recount, _ = train(outside, dataset(16), accumulate=8)
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())
    assert stored.points("tokens/computed")[-1][0] == 2  # steps


def test_the_last_batch_of_two_samples_holds_two() -> None:
    meter = Meter(0, PhaseClock())
    for rows in (4, 4, 2):  # 10 samples in batches of 4; three times 4 would be 12
        ids = np.full((rows, 7), 5)
        meter.count(count_batch(find_fields({"input_ids": ids}), PadPolicy(none=True)))
        meter.step()
    reading = meter.reading(3)
    assert reading is not None
    assert reading.computed == 70


def test_totals_never_fall_when_batches_shrink() -> None:
    meter = Meter(0, PhaseClock())
    seen = []
    for step, rows in enumerate((1, 2, 1, 5, 1), start=1):
        meter.count(count_batch(find_fields({"input_ids": np.full((rows, 3), 5)}), PadPolicy(none=True)))
        meter.step()
        reading = meter.reading(step)
        assert reading is not None
        seen.append(reading.computed)
    assert seen == [3, 9, 12, 27, 30]


def test_a_resumed_run_divides_its_own_tokens_by_its_own_time() -> None:
    # 4,150 tokens a second for 1,000 s; then the same for 100 s after a restart. Not 4.565 M / 100 s.
    records: list[Record] = [
        segment("a"),
        quantities("a", seq=1, train=1000.0, computed=4_150_000, valid=4_150_000),
        segment("b"),
        quantities("b", seq=2, step=20, position=20, train=100.0, computed=415_000, valid=415_000),
    ]
    *_, first, resumed = [snapshot.metrics for snapshot in replay(records)]
    for metrics in (first, resumed):
        assert metrics["throughput/tokens_per_second"] == pytest.approx(4150)
        assert metrics["throughput/tokens_per_second_average"] == pytest.approx(4150)
    assert resumed["tokens/computed"] == 4_565_000


def test_eight_ranks_that_are_resumed_as_four_do_not_halve_their_past() -> None:
    records: list[Record] = [
        segment("a", (8,)),
        quantities("a", ranks=8, seq=1, train=80.0, computed=8_000_000_000, valid=8_000_000_000),
        segment("b", (4,)),
        quantities("b", ranks=4, seq=2, step=20, position=20, train=4.0, computed=4000, valid=4000),
    ]
    assert account_of(records).computed == 8_000_004_000


def test_rates_divide_by_the_time_in_which_the_tokens_were_computed() -> None:
    # Neither all tokens by the last step's time, nor ten steps' tokens by one's, nor by a clock's reading.
    seconds = itertools.count(1_000_000.0, 2.0)  # the clock does not begin at 0
    moment = next(seconds)

    def now() -> float:
        return moment

    clock = PhaseClock(moment, now)
    meter = Meter(0, clock)
    for _ in range(10):
        meter.count(count_batch(find_fields({"input_ids": np.full((2, 50), 5)}), PadPolicy(none=True)))
        moment = next(seconds)
        meter.step()
    reading = meter.reading(10)
    assert reading is not None
    assert reading.seconds["train"] == 20.0
    taken = quantities(computed=reading.computed, valid=reading.valid, train=reading.seconds["train"])
    metrics = derive(account_of([segment(), taken]), Account(), "step").metrics
    assert metrics["throughput/tokens_per_second"] == pytest.approx(1000 / 20)


@pytest.mark.parametrize("dtype", ["int32", "int16"])
def test_narrow_integers_do_not_overflow(dtype: str) -> None:
    # 10,251,184,259 in 32 bits is 1,661,249,667: here every sum of a batch and of the batches is 64 bits.
    ids = paddle.full([4, 4096], 7, dtype)
    mask = paddle.ones([4, 4096], dtype)
    counts = count_batch(find_fields({"input_ids": ids, "attention_mask": mask, "labels": ids}), PadPolicy())
    assert "int64" in str(counts.valid.dtype) and "int64" in str(counts.trained.dtype)
    meter = Meter(0, PhaseClock())
    meter.count(counts)
    meter.step()
    reading = meter.reading(1)
    assert reading is not None
    assert (reading.computed, reading.valid, reading.trained) == (16_384, 16_384, 16_384)


@pytest.mark.parametrize("total", [2**24 + 1, 1_000_000_001, 10_251_184_259, 2**53 - 1])
def test_totals_that_float32_and_int32_do_not_hold_arrive_exactly(
    stored: Stored, tmp_path: Path, total: int
) -> None:
    with mlflow_tokens.Tracker(visualdl=tmp_path / "visualdl", jsonl=tmp_path / "log.jsonl") as tracker:
        tracker.count(computed=total, valid=total - 1)
        tracker.step()
    metrics = stored.metrics()
    assert (metrics["tokens/computed"], metrics["tokens/valid"]) == (total, total - 1)
    assert f'"tokens/computed":{total},' in (tmp_path / "log.jsonl").read_text()
    assert str(total) in "".join(path.read_text() for path in sidecars(tmp_path / "visualdl"))


def sidecars(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl"))


def test_the_wall_clock_may_jump_and_no_second_is_lost_or_negative() -> None:
    # The records' times go back by an hour; money and rates are of the monotonic seconds alone.
    records: list[Record] = [
        segment(),
        price("3600 USD/device-hour"),
        quantities(seq=1, train=10.0, computed=1000, valid=1000, t_wall=1_700_003_600.0),
        quantities(
            seq=2, step=20, position=20, train=20.0, computed=2000, valid=2000, t_wall=1_700_000_000.0
        ),
    ]
    last = list(replay(records))[-1].metrics
    assert last["cost/total"] == pytest.approx(20.0)
    assert last["throughput/tokens_per_second"] == pytest.approx(100)
