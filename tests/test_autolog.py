"""`autolog()` in raw Paddle loops of one process, against a recount that shares no code with it."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlflow
import numpy as np
import paddle
import pytest
from mlflow import MlflowClient
from paddle import nn
from paddle.nn import functional as F

import mlflow_tokens
from tests.conftest import Stored

VOCABULARY, PAD = 50, 3


class Model(nn.Layer):
    """The smallest language model: what matters here is what goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        logits = self.head(self.dropout(self.embedding(input_ids)))
        return logits if labels is None else F.cross_entropy(logits, labels)


@dataclass
class Recount:
    """Counts with plain Python loops over plain lists."""

    computed: int = 0
    valid: int = 0
    trained: int = 0
    rows: list[list[int]] = field(default_factory=list)

    def add(self, ids: list[list[int]], labels: list[list[int]], ignore_index: int = -100) -> None:
        for row, label_row in zip(ids, labels, strict=True):
            for token, label in zip(row, label_row, strict=True):
                self.computed += 1
                self.valid += token != PAD
                self.trained += label != ignore_index

    def equals(self, metrics: dict[str, float]) -> bool:
        return [metrics.get(f"tokens/{kind}") for kind in ("computed", "valid", "trained", "effective")] == [
            self.computed,
            self.valid,
            self.trained,
            self.valid,
        ]


def dataset(
    batches: int, seed: int = 0, ignore_index: int = -100
) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Padded batches whose sizes differ, the last one smaller; the first half of each row is a prompt."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(batches):
        rows = 4 if number < batches - 1 else 2
        width = int(rng.integers(6, 12))
        ids, labels = [], []
        for _ in range(rows):
            length = int(rng.integers(4, width + 1))
            text = [int(token) for token in rng.integers(4, VOCABULARY, length)]
            ids.append(text + [PAD] * (width - length))
            labels.append([ignore_index] * 2 + text[2:] + [ignore_index] * (width - length))
        made.append((ids, labels))
    return made


def train(
    loss_of: Callable[[Any, Any, Any], Any],
    batches: list[tuple[list[list[int]], list[list[int]]]],
    model: Any = None,
    accumulate: int = 1,
    ignore_index: int = -100,
) -> tuple[Recount, list[float]]:
    """A raw loop; returns the recount and the losses."""
    model = model or Model()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    recount, losses = Recount(), []
    for number, (ids, labels) in enumerate(batches, start=1):
        loss = loss_of(model, paddle.to_tensor(ids), paddle.to_tensor(labels))
        loss.backward()
        losses.append(float(loss))
        recount.add(ids, labels, ignore_index)
        if number % accumulate == 0:
            optimizer.step()
            optimizer.clear_grad()
    return recount, losses


def outside(model: Any, ids: Any, labels: Any) -> Any:
    return F.cross_entropy(model(ids), labels)


def by_layer(model: Any, ids: Any, labels: Any) -> Any:
    return nn.CrossEntropyLoss()(model(input_ids=ids, attention_mask=(ids != PAD)), labels)


def inside(model: Any, ids: Any, labels: Any) -> Any:
    return model(ids, labels=labels)


def positional(model: Any, ids: Any, labels: Any) -> Any:
    return model(ids, (ids != PAD).astype("float32"), labels)


def amp(model: Any, ids: Any, labels: Any) -> Any:
    with paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
        return F.cross_entropy(model(ids), labels)


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


def test_the_scripts_random_numbers_are_its_own(stored: Stored) -> None:
    """MLflow names a run with Python's global generator: also when it does so for us, in the background."""

    def run() -> list[float]:
        random.seed(5)
        train(outside, dataset(12))
        drawn = [random.random()]
        mlflow_tokens.autolog(disable=True)
        return [*drawn, random.random()]

    without = run()
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=1)
    assert run() == without
    assert len(stored.runs()) == 1
    # The script's own use of MLflow draws what it always drew.
    random.seed(5)
    MlflowClient().create_run("0")
    after_a_name = random.random()
    random.seed(5)
    assert random.random() != after_a_name


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


def test_each_run_of_a_sweep_in_one_process_has_its_own_totals(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD, price="2 USD/device-hour")
    recounts = []
    for seed in range(3):
        with mlflow.start_run():
            recounts.append(train(outside, dataset(12, seed=seed))[0])
    mlflow_tokens.autolog(disable=True)
    runs = stored.runs()
    assert len(runs) == 3
    for run, recount in zip(runs, recounts, strict=True):
        assert recount.equals(run.data.metrics)
        assert [step for step, _ in stored.points("tokens/computed", run.info.run_id)] == [10, 12]
    # The time between two runs is charged to the later one: no second is charged twice.
    hours = sum(run.data.metrics["device/hours"] for run in runs)
    tracker_hours = sum(run.data.metrics["cost/total"] for run in runs) / 2
    assert hours == pytest.approx(tracker_hours)


def test_micro_batches_of_a_step_that_never_ended_are_not_the_next_runs(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    recounts = []
    for seed in range(2):
        batches = dataset(13, seed=seed)
        with mlflow.start_run():
            train(outside, batches, accumulate=4)  # 3 steps, and a micro-batch that is left over
        recounts.append(Recount())
        for ids, labels in batches[:12]:
            recounts[-1].add(ids, labels)
    mlflow_tokens.autolog(disable=True)
    for run, recount in zip(stored.runs(), recounts, strict=True):
        assert recount.equals(run.data.metrics)


def test_a_run_of_fewer_steps_than_the_interval_still_has_its_totals(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    with mlflow.start_run() as run:
        recount, _ = train(outside, dataset(3))
    assert stored.only_run().info.run_id == run.info.run_id
    assert recount.equals(stored.metrics())


def test_ours_are_logged_at_the_steps_at_which_the_script_logs(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=2)
    model = Model()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    with mlflow.start_run():
        for index, (ids, labels) in enumerate(dataset(20)):
            loss = outside(model, paddle.to_tensor(ids), paddle.to_tensor(labels))
            loss.backward()
            optimizer.step()
            if index % 5 == 0:
                mlflow.log_metrics({"loss": float(loss), "lr": 0.01}, step=index)
    losses = {step for step, _ in stored.points("loss")}
    ours = [step for step, _ in stored.points("tokens/computed")]
    assert losses == {0, 5, 10, 15}
    assert losses <= set(ours)
    assert ours == sorted(ours)
    assert ours[-1] == 19  # the last step, counted from 0 as the script does


def test_a_script_that_logs_without_a_run_joins_ours(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=2)
    model = Model()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    for index, (ids, labels) in enumerate(dataset(20), start=1):
        loss = outside(model, paddle.to_tensor(ids), paddle.to_tensor(labels))
        loss.backward()
        optimizer.step()
        if index % 10 == 0:
            mlflow.log_metric("loss", float(loss), step=index)
    mlflow_tokens.autolog(disable=True)
    mlflow.end_run()
    assert [step for step, _ in stored.points("loss")] == [10, 20]
    assert {10, 20} <= {step for step, _ in stored.points("tokens/computed")}
    assert stored.only_run().info.status == "FINISHED"


def test_disable_takes_every_hook_out(stored: Stored) -> None:
    from mlflow import MlflowClient

    owners = [paddle, F, nn.Layer, MlflowClient, paddle.optimizer.Optimizer, paddle.optimizer.Adam]
    owners += [paddle.optimizer.AdamW, paddle.optimizer.LBFGS, paddle.incubate.optimizer.LookAhead]
    before = [dict(vars(owner)) for owner in owners]
    mlflow_tokens.autolog()
    assert [dict(vars(owner)) for owner in owners] != before
    model = Model()
    train(outside, dataset(3), model=model)
    assert model._forward_pre_hooks
    mlflow_tokens.autolog(disable=True)
    assert [dict(vars(owner)) for owner in owners] == before
    assert not model._forward_pre_hooks
    assert mlflow_tokens.current() is None
    train(outside, dataset(3), model=model)
    assert len(stored.runs()) == 1


def test_mlflows_own_switch_turns_us_off(stored: Stored) -> None:
    before = dict(vars(nn.Layer))
    mlflow_tokens.autolog(pad_token_id=PAD)
    recount, _ = train(outside, dataset(3))
    mlflow.autolog(disable=True)
    train(outside, dataset(3))
    assert mlflow_tokens.current() is None
    assert dict(vars(nn.Layer)) == before
    assert stored.metrics()["tokens/computed"] == recount.computed


def test_it_follows_mlflows_conventions(stored: Stored) -> None:
    from mlflow.utils.autologging_utils import autologging_is_disabled, get_autologging_config

    tracker = mlflow_tokens.autolog(price="2 USD/device-hour", silent=True)
    assert tracker is mlflow_tokens.current()
    assert not autologging_is_disabled("mlflow_tokens")
    assert get_autologging_config("mlflow_tokens", "price") == "2 USD/device-hour"
    assert get_autologging_config("mlflow_tokens", "silent") is True
    assert mlflow_tokens.autolog(disable=True) is None
    assert autologging_is_disabled("mlflow_tokens")


def test_a_bad_option_is_an_error_at_once_and_leaves_the_running_one_alone(stored: Stored) -> None:
    tracker = mlflow_tokens.autolog(pad_token_id=PAD)
    with pytest.raises(ValueError, match="Valid prices"):
        mlflow_tokens.autolog(price="cheap")
    assert mlflow_tokens.current() is tracker
    recount, _ = train(outside, dataset(3))
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())


def test_visualdl_gets_the_same_scalars_and_a_sidecar_with_exact_integers(
    stored: Stored, tmp_path: Any
) -> None:
    import json

    from visualdl import LogReader

    mlflow_tokens.autolog(
        pad_token_id=PAD, log_every_steps=2, visualdl=tmp_path / "vdl", price="2 CNY/device-hour"
    )
    recount, _ = train(outside, dataset(21))
    mlflow_tokens.autolog(disable=True)
    # What our own sinks write is not taken for the script's own logging.
    assert [step for step, _ in stored.points("tokens/computed")] == [*range(2, 21, 2), 21]
    (records,) = (tmp_path / "vdl" / "tokens").glob("*vdlrecords*")
    reader = LogReader(file_path=str(records))
    assert set(reader.get_tags()["scalar"]) == set(stored.metrics())
    points = [(point.id, point.value) for point in reader.get_data("scalar", "tokens/computed")]
    assert points == stored.points("tokens/computed")
    sidecar = json.loads((tmp_path / "vdl" / "tokens" / "mlflow_tokens.json").read_text("utf-8"))
    assert sidecar["counts"]["tokens/computed"] == recount.computed
    assert sidecar["tags"]["mlflow_tokens.currency"] == "CNY"
