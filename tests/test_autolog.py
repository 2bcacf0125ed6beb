"""`autolog()` in raw Paddle loops of one process, against a recount that shares no code with it."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import paddle
import pytest
from paddle.nn import functional as F

import mlflow_tokens
from tests.conftest import Stored
from tests.loops import PAD, Model, Recount, amp, by_layer, dataset, inside, outside, positional, train


@pytest.mark.parametrize("loss_of", [outside, by_layer, inside, positional, amp])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_totals_equal_a_recount_to_the_token(stored: Stored, loss_of: Any, accumulate: int) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=3)
    recount, _ = train(loss_of, dataset(24), accumulate=accumulate)
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics()), (recount, stored.metrics())
    assert stored.only_run().info.status == "FINISHED"
    steps = 24 // accumulate
    assert {step for step, _ in stored.points("tokens/computed")} == {*range(3, steps + 1, 3), steps}


def test_grad_scaler(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    model = Model()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    scaler = paddle.amp.GradScaler(init_loss_scaling=2.0)
    recount = Recount()
    for ids, labels in dataset(5):
        with paddle.amp.auto_cast(dtype="bfloat16"):
            loss = F.cross_entropy(model(paddle.to_tensor(ids)), paddle.to_tensor(labels))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        recount.add(ids, labels)
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())
    assert stored.points("tokens/computed")[-1][0] == 5


def test_minimize_is_a_step(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    model, recount = Model(), Recount()
    optimizer = paddle.optimizer.SGD(1e-2, parameters=model.parameters())
    for ids, labels in dataset(4):
        loss = F.cross_entropy(model(paddle.to_tensor(ids)), paddle.to_tensor(labels))
        loss.backward()
        optimizer.minimize(loss)
        model.clear_gradients()
        recount.add(ids, labels)
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())
    assert stored.points("tokens/computed")[-1][0] == 4


def test_an_optimizer_class_written_after_autolog_is_seen(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)

    class Plain(paddle.optimizer.SGD):
        def step(self) -> None:
            for parameter in self._parameter_list:
                parameter.set_value(parameter - 1e-2 * parameter.grad)

    model, recount = Model(), Recount()
    optimizer = Plain(1e-2, parameters=model.parameters())
    for ids, labels in dataset(4):
        outside(model, paddle.to_tensor(ids), paddle.to_tensor(labels)).backward()
        optimizer.step()
        optimizer.clear_grad()
        recount.add(ids, labels)
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())
    assert stored.points("tokens/computed")[-1][0] == 4


def test_two_optimizers_over_one_model_make_one_step(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    model, recount = Model(), Recount()
    optimizers = [
        paddle.optimizer.AdamW(1e-2, parameters=model.embedding.parameters()),
        paddle.optimizer.SGD(1e-2, parameters=model.head.parameters()),
    ]
    for ids, labels in dataset(4):
        outside(model, paddle.to_tensor(ids), paddle.to_tensor(labels)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.clear_grad()
        recount.add(ids, labels)
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())
    assert stored.points("tokens/computed")[-1][0] == 4


@pytest.mark.parametrize("full_graph", [True, False])
def test_a_model_turned_into_a_static_graph(stored: Stored, full_graph: bool) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    recount, _ = train(outside, dataset(4), model=paddle.jit.to_static(Model(), full_graph=full_graph))
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())


def test_the_ignore_index_of_the_loss_counts(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    recount, _ = train(
        lambda model, ids, labels: F.cross_entropy(model(ids), labels, ignore_index=1),
        dataset(5, ignore_index=1),
        ignore_index=1,
    )
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())


def test_autolog_after_the_model_and_the_optimizer_were_made(stored: Stored) -> None:
    model = Model()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    mlflow_tokens.autolog(pad_token_id=PAD)
    recount = Recount()
    for ids, labels in dataset(6):
        outside(model, paddle.to_tensor(ids), paddle.to_tensor(labels)).backward()
        optimizer.step()
        recount.add(ids, labels)
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())


def test_training_is_the_same_to_the_bit_with_and_without_us(stored: Stored) -> None:
    def run() -> tuple[list[float], float]:
        paddle.seed(7)
        _, losses = train(outside, dataset(15), accumulate=2)
        return losses, float(paddle.rand([1]))

    without = run()
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=1)
    assert run() == without
    mlflow_tokens.autolog(disable=True)
    assert "tokens/computed" in stored.metrics()


def test_a_copy_of_the_model_is_not_the_model(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    model = Model()
    first, _ = train(outside, dataset(3), model=model)
    averaged, pickled = copy.deepcopy(model), pickle.dumps(model)
    ids, _ = dataset(1)[0]
    for other in (averaged, pickle.loads(pickled)):
        other(paddle.to_tensor(ids))  # in training mode, with gradients on
        other(input_ids=paddle.to_tensor(ids))
    assert b"mlflow_tokens" not in pickled
    second, _ = train(outside, dataset(3), model=model)
    mlflow_tokens.autolog(disable=True)
    assert stored.metrics()["tokens/computed"] == first.computed + second.computed
    assert stored.points("tokens/computed")[-1][0] == 6


def test_validation_in_the_loop_is_neither_tokens_nor_training_time(stored: Stored) -> None:
    tracker = mlflow_tokens.autolog(pad_token_id=PAD)
    assert tracker is not None
    model, recount = Model(), Recount()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    clock = tracker.meter.clock
    for ids, labels in dataset(3):
        outside(model, paddle.to_tensor(ids), paddle.to_tensor(labels)).backward()
        optimizer.step()
        recount.add(ids, labels)
        model.eval()
        with paddle.no_grad():
            outside(model, paddle.to_tensor(ids), paddle.to_tensor(labels))
        assert clock.phase == "eval"
        goal = clock.seconds()["eval"] + 0.2
        while clock.seconds()["eval"] < goal:
            pass
        model.train()
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())
    seconds = clock.seconds()
    assert seconds["eval"] >= 0.6
    assert stored.metrics()["throughput/tokens_per_second_average"] == pytest.approx(
        recount.computed / seconds["train"], rel=0.05
    )


@pytest.mark.parametrize("turned", ["inner", "wrapper"])
@pytest.mark.parametrize("called", ["inner", "wrapper"])
def test_evaluation_through_the_wrapper_or_through_the_model_itself(
    stored: Stored, turned: str, called: str
) -> None:
    tracker = mlflow_tokens.autolog(pad_token_id=PAD)
    assert tracker is not None
    models = {"inner": Model()}
    models["wrapper"] = paddle.DataParallel(models["inner"])
    recount = Recount()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=models["wrapper"].parameters())
    for ids, labels in dataset(3):
        models[turned].train()
        outside(models["wrapper"], paddle.to_tensor(ids), paddle.to_tensor(labels)).backward()
        optimizer.step()
        recount.add(ids, labels)
        models[turned].eval()
        outside(models[called], paddle.to_tensor(ids), paddle.to_tensor(labels))  # with gradients on
        assert tracker.meter.clock.phase == "eval"
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())


def test_a_checkpoint_is_not_training_time(stored: Stored, tmp_path: Any) -> None:
    tracker = mlflow_tokens.autolog(pad_token_id=PAD)
    assert tracker is not None
    train(outside, dataset(2))
    assert tracker.meter.clock.seconds()["checkpoint"] == 0.0
    paddle.save({"weights": paddle.zeros([1000, 1000])}, str(tmp_path / "checkpoint.pdparams"))
    assert tracker.meter.clock.seconds()["checkpoint"] > 0.0
    assert tracker.meter.clock.phase == "train"


def test_a_teacher_is_not_trained_so_its_tokens_do_not_count(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    teacher = Model()  # left in training mode, with gradients on

    def distil(model: Any, ids: Any, labels: Any) -> Any:
        return F.cross_entropy(model(ids), labels) + F.mse_loss(model(ids), teacher(ids).detach())

    recount, _ = train(distil, dataset(6))
    mlflow_tokens.autolog(disable=True)
    # The student is called twice on the same ids: that many positions were computed, the teacher's are not.
    assert stored.metrics()["tokens/computed"] == 2 * recount.computed


def test_a_part_of_the_model_called_once_more_is_not_another_model(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    recount, _ = train(
        lambda model, ids, labels: F.cross_entropy(model(ids), labels) + model.embedding(ids).mean(),
        dataset(6),
    )
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())


def test_a_model_called_in_parts_is_counted_where_the_ids_go_in(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    recount, _ = train(
        lambda model, ids, labels: F.cross_entropy(model.head(model.embedding(ids)), labels), dataset(6)
    )
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())


def test_two_models_one_after_the_other_are_both_counted(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    first, _ = train(outside, dataset(4))
    second, _ = train(outside, dataset(5, seed=1))
    mlflow_tokens.autolog(disable=True)
    assert stored.metrics()["tokens/computed"] == first.computed + second.computed
    assert stored.points("tokens/computed")[-1][0] == 9


def test_models_and_optimizers_made_before_autolog_are_all_found(stored: Stored) -> None:
    models = [Model(), Model()]
    optimizers = [paddle.optimizer.AdamW(1e-2, parameters=model.parameters()) for model in models]
    mlflow_tokens.autolog(pad_token_id=PAD)
    recount = Recount()
    for ids, labels in dataset(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            outside(model, paddle.to_tensor(ids), paddle.to_tensor(labels)).backward()
            optimizer.step()
            optimizer.clear_grad()
            recount.add(ids, labels)
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())


def test_recomputing_the_whole_model_counts_its_tokens_once(stored: Stored) -> None:
    from paddle.distributed.fleet.utils import recompute

    mlflow_tokens.autolog(pad_token_id=PAD)
    recount, _ = train(
        lambda model, ids, labels: F.cross_entropy(recompute(model, ids, use_reentrant=False), labels),
        dataset(6),
    )
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())


def test_once_the_model_is_found_other_layers_are_called_as_if_we_were_not_there(stored: Stored) -> None:
    gc.collect()  # optimizers of other tests
    before = vars(paddle.nn.Layer)["__call__"]
    mlflow_tokens.autolog(pad_token_id=PAD)
    model = Model()
    train(outside, dataset(1), model=model)
    assert vars(paddle.nn.Layer)["__call__"] is before
    train(outside, dataset(3, seed=1), model=model)
    assert vars(paddle.nn.Layer)["__call__"] is before
    mlflow_tokens.autolog(disable=True)


def test_a_trained_model_can_be_saved_as_a_static_graph(stored: Stored, tmp_path: Any) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    model = Model()
    recount, _ = train(outside, dataset(3), model=model)
    model.eval()
    spec = [paddle.static.InputSpec([None, None], "int64", "input_ids")]
    paddle.jit.save(model, str(tmp_path / "model"), input_spec=spec)
    assert (tmp_path / "model.pdiparams").exists()
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())
