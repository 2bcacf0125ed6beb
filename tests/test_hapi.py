"""`paddle.Model.fit` under `autolog()`, against values worked out by hand and a recount by plain loops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.amp.auto_cast import amp_global_state

import mlflow_tokens
from tests.conftest import Stored
from tests.hapi import (
    COMPUTED,
    LENGTHS,
    TRAINED,
    VALID,
    batches,
    callback,
    fit,
    hapi_model,
    loader,
    recount,
    totals,
)
from tests.loops import PAD, Model


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hapi and MLflow write into the directory that they are called in."""
    monkeypatch.chdir(tmp_path)


def test_the_batches_are_what_is_said_of_them() -> None:
    made = batches()
    assert tuple(sum(map(len, ids)) for ids, _ in made) == COMPUTED
    assert tuple(sum(token != PAD for row in ids for token in row) for ids, _ in made) == VALID
    assert tuple(sum(label != -100 for row in labels for label in row) for _, labels in made) == TRAINED
    assert (sum(COMPUTED), sum(VALID), sum(TRAINED)) == (64, 45, 25)


def test_fit_alone_is_counted_to_the_token(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=1)
    fit(hapi_model(), 2)
    mlflow_tokens.autolog(disable=True)
    assert totals(stored.metrics()) == [128, 90, 50, 90]
    assert recount(2).equals(stored.metrics())
    assert stored.only_run().info.status == "FINISHED"
    assert stored.points("tokens/computed")[:6] == [(1, 24), (2, 52), (3, 64), (4, 88), (5, 116), (6, 128)]
    assert stored.points("tokens/trained")[:3] == [(1, 10), (2, 19), (3, 25)]


def test_accumulated_gradients_are_one_step(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=1)
    fit(hapi_model(), 2, accumulate_grad_batches=2)
    mlflow_tokens.autolog(disable=True)
    # hapi updates after the second batch and after the last one of an epoch.
    assert stored.points("tokens/computed")[:4] == [(1, 52), (2, 64), (3, 116), (4, 128)]
    assert stored.points("tokens/computed")[-1] == (4, 128)
    assert recount(2).equals(stored.metrics())


def test_a_batch_that_no_update_follows_is_not_counted(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    fit(hapi_model(), accumulate_grad_batches=2, num_iters=4)
    mlflow_tokens.autolog(disable=True)
    assert recount(1).equals(stored.metrics())
    assert stored.points("tokens/computed")[-1] == (2, 64)


def test_evaluation_data_is_neither_tokens_nor_training_time(stored: Stored) -> None:
    tracker = mlflow_tokens.autolog(pad_token_id=PAD)
    assert tracker is not None
    clock = tracker.meter.clock
    evaluated = []

    def evaluation(step: int, logs: Any = None) -> None:
        assert clock.phase == "eval"
        goal = clock.seconds()["eval"] + 0.1
        while clock.seconds()["eval"] < goal:
            pass
        evaluated.append(step)

    watches = callback(on_eval_batch_end=evaluation)
    fit(hapi_model(), 2, eval_data=loader(), callbacks=[watches])
    seconds = clock.seconds()
    mlflow_tokens.autolog(disable=True)
    assert evaluated == [0, 1, 2] * 2
    assert recount(2).equals(stored.metrics())
    assert seconds["eval"] >= 0.6
    assert stored.metrics()["throughput/tokens_per_second_average"] == pytest.approx(
        128 / (seconds["train"] + seconds["data_wait"]), rel=0.05
    )


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Paddle turns loss scaling off on a CPU and outside of float16; its arithmetic works there as well."""
    place = SimpleNamespace(is_gpu_place=lambda: True)
    monkeypatch.setattr(
        "paddle.amp.grad_scaler._dygraph_tracer", lambda: SimpleNamespace(_expected_place=place)
    )
    state = amp_global_state()
    before, state.amp_dtype = state.amp_dtype, "float16"
    yield
    state.amp_dtype = before


@pytest.mark.usefixtures("scaling")
def test_steps_that_hapis_loss_scaler_leaves_out_are_not_effective(stored: Stored) -> None:
    """The second batch of the first epoch, and the first one of the second."""
    factors = iter([1.0, math.inf, 1.0, math.inf, 1.0, 1.0])

    def loss(logits: Any, labels: Any) -> Any:
        return nn.functional.cross_entropy(logits, labels) * next(factors)

    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=1)
    fit(hapi_model(loss=loss, amp_configs={"level": "O1", "init_loss_scaling": 8.0}), 2)
    mlflow_tokens.autolog(disable=True)
    metrics = stored.metrics()
    assert totals(metrics) == [128, 90, 50, 90 - 17 - 18]
    assert metrics["tokens/skipped"] == 17 + 18
    assert stored.points("tokens/computed")[:4] == [(1, 24), (2, 64), (3, 116), (4, 128)]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_mixed_precision(stored: Stored, level: str, accumulate: int) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    fit(hapi_model(amp_configs=level), 2, accumulate_grad_batches=accumulate)
    mlflow_tokens.autolog(disable=True)
    assert recount(2).equals(stored.metrics())
    assert stored.points("tokens/computed")[-1] == (6 // accumulate + accumulate - 1, 128)


def test_train_batch_called_by_hand(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=1)
    model = hapi_model()
    for number, (ids, labels) in enumerate(batches()):
        model.train_batch([np.array(ids)], [np.array(labels)], update=number != 0)
    mlflow_tokens.autolog(disable=True)
    assert recount(1).equals(stored.metrics())
    assert stored.points("tokens/computed")[:2] == [(1, 52), (2, 64)]


def test_fit_called_twice_goes_on(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=2)
    model = hapi_model()
    fit(model)
    fit(model, 2)
    mlflow_tokens.autolog(disable=True)
    assert recount(3).equals(stored.metrics())
    assert stored.points("tokens/computed")[:4] == [(2, 52), (4, 88), (6, 128), (8, 180)]
    assert stored.points("tokens/computed")[-1] == (9, 192)


def test_another_model_is_fitted_after_the_first(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    fit(hapi_model())
    fit(hapi_model(), 2)
    mlflow_tokens.autolog(disable=True)
    assert recount(3).equals(stored.metrics())
    assert stored.points("tokens/computed")[-1] == (9, 192)


def test_autolog_between_prepare_and_fit(stored: Stored) -> None:
    model = hapi_model()
    mlflow_tokens.autolog(pad_token_id=PAD)
    fit(model, 2)
    mlflow_tokens.autolog(disable=True)
    assert recount(2).equals(stored.metrics())


def test_a_checkpoint_of_fit_is_resumed(stored: Stored, tmp_path: Path) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD, price="2 USD/device-hour")
    fit(hapi_model(), 3, save_dir=tmp_path / "saved", accumulate_grad_batches=2)
    mlflow_tokens.autolog(disable=True)
    before = stored.metrics()
    assert recount(3).equals(before)
    assert before["cost/phase/checkpoint"] > 0

    mlflow_tokens.autolog(pad_token_id=PAD, price="2 USD/device-hour")
    model = hapi_model()
    model.load(str(tmp_path / "saved" / "0"))
    fit(model, accumulate_grad_batches=2)
    mlflow_tokens.autolog(disable=True)
    metrics = stored.metrics()
    # Three epochs and one were computed; epoch 0 and the last one are in the model.
    assert totals(metrics) == [4 * 64, 4 * 45, 4 * 25, 2 * 45]
    assert metrics["cost/total"] > before["cost/total"]
    assert metrics["cost/waste/rolled_back"] > 0


def test_what_a_callback_asks_of_the_model_is_not_counted(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=1)
    model = hapi_model()
    ids, labels = (np.array(part) for part in batches()[0])
    asked = []

    def asks(step: int, logs: Any = None) -> None:
        # After the first batch of two, the step that it belongs to has not ended.
        asked.append(len(model.eval_batch([ids], [labels])))
        asked.append(len(model.predict_batch([ids])))
        model.network.train()

    def asks_more(epoch: int, logs: Any = None) -> None:
        model.predict(paddle.io.TensorDataset([paddle.to_tensor(ids)]), batch_size=2, verbose=0)
        model.evaluate(loader(), verbose=0)

    watches = callback(on_train_batch_begin=asks, on_train_batch_end=asks, on_epoch_end=asks_more)
    fit(model, 2, callbacks=[watches], accumulate_grad_batches=2)
    mlflow_tokens.autolog(disable=True)
    assert asked == [1] * 24
    assert recount(2).equals(stored.metrics())
    assert stored.points("tokens/computed")[:4] == [(1, 52), (2, 64), (3, 116), (4, 128)]


def test_what_a_metric_asks_of_the_network_is_not_counted(stored: Stored) -> None:
    class Asks(paddle.metric.Accuracy):
        asked = 0

        def compute(self, logits: Any, labels: Any, *args: Any) -> Any:
            with paddle.no_grad():
                model.network(paddle.to_tensor(batches()[1][0]))
            self.asked += 1
            return super().compute(logits.reshape([-1, logits.shape[-1]]), labels.reshape([-1, 1]))

    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=1)
    metric = Asks()
    model = hapi_model(metrics=metric)
    fit(model, 2, eval_data=loader())
    mlflow_tokens.autolog(disable=True)
    assert metric.asked == 12
    assert recount(2).equals(stored.metrics())


def test_rows_without_labels_make_trained_tokens_unknown(stored: Stored) -> None:
    """A loss of one's own, which no cross entropy is called in."""
    mlflow_tokens.autolog(pad_token_id=PAD)
    fit(hapi_model(loss=lambda logits, labels: (logits * logits).mean()))
    mlflow_tokens.autolog(disable=True)
    assert totals(stored.metrics()) == [64, 45, None, 45]


def test_a_network_that_is_given_its_labels(stored: Stored) -> None:
    """It computes its loss itself, from labels and a mask that are inputs to hapi."""

    class Inside(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
            return self.model(input_ids, attention_mask, labels)

    mlflow_tokens.autolog(log_every_steps=1)
    model = paddle.Model(Inside())  # hapi knows its inputs by the names in `forward`
    model.prepare(paddle.optimizer.AdamW(1e-3, parameters=model.parameters()), lambda loss: loss)
    made = [[*map(np.array, (ids, labels))] for ids, labels in batches()]
    model.fit([[ids, (ids != PAD).astype("int64"), labels] for ids, labels in made], epochs=2, verbose=0)
    mlflow_tokens.autolog(disable=True)
    assert recount(2).equals(stored.metrics())
    assert stored.points("tokens/trained")[:3] == [(1, 10), (2, 19), (3, 25)]


def test_a_static_program_is_not_counted_and_one_line_says_so(
    stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    paddle.enable_static()
    try:
        mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=1)
        fit(hapi_model(), 2)
        mlflow_tokens.autolog(disable=True)
    finally:
        paddle.disable_static()
    assert stored.runs() == []
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "WARNING mlflow_tokens" in line)
    assert "not counted" in line


def test_an_exception_in_fit_fails_the_scripts_run_with_the_last_totals(stored: Stored) -> None:
    def fails(step: int, logs: Any = None) -> None:
        if step == 1:
            raise RuntimeError("the callback fails")

    mlflow_tokens.autolog(pad_token_id=PAD)
    with pytest.raises(RuntimeError, match="the callback fails"), mlflow.start_run():
        fit(hapi_model(), callbacks=[callback(on_train_batch_end=fails)])
    mlflow_tokens.autolog(disable=True)
    assert stored.only_run().info.status == "FAILED"
    assert totals(stored.metrics()) == [24 + 28, 18 + 17, 10 + 9, 18 + 17]


def test_training_is_the_same_to_the_bit_with_and_without_us(stored: Stored) -> None:
    def run() -> list[float]:
        paddle.seed(7)
        losses: list[float] = []
        watches = callback(on_train_batch_end=lambda step, logs: losses.append(float(logs["loss"][0])))
        fit(hapi_model(), 3, callbacks=[watches], eval_data=loader(), accumulate_grad_batches=2)
        return [*losses, float(paddle.rand([1]))]

    without = run()
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=1)
    assert run() == without
    assert len(without) == 10
    mlflow_tokens.autolog(disable=True)
    assert recount(3).equals(stored.metrics())


def test_hapis_own_batches_of_a_dataset(stored: Stored) -> None:
    """`fit` makes the loader, shuffles and stacks; rows are as wide as the longest one."""

    class Rows(paddle.io.Dataset):
        def __getitem__(self, index: int) -> tuple[Any, ...]:
            ids, labels = padded_to(7, index)
            return np.array(ids), np.array(labels)

        def __len__(self) -> int:
            return len(LENGTHS)

    def padded_to(width: int, index: int) -> tuple[list[int], list[int]]:
        ids, labels = batches()[index // 4]
        missing = width - len(ids[0])
        return ids[index % 4] + [PAD] * missing, labels[index % 4] + [-100] * missing

    mlflow_tokens.autolog(pad_token_id=PAD)
    hapi_model().fit(Rows(), epochs=2, batch_size=4, verbose=0, shuffle=True, drop_last=False)
    mlflow_tokens.autolog(disable=True)
    assert totals(stored.metrics()) == [2 * 10 * 7, 90, 50, 90]
    assert stored.points("tokens/computed")[-1] == (6, 140)
