"""Models and functions that Paddle turns into static graphs, by their syntax (AST) or as they run (SOT)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

import mlflow_tokens
from tests.conftest import Stored
from tests.loops import PAD, Model, dataset, outside, train

KINDS = pytest.mark.parametrize("full_graph", [True, False], ids=["ast", "sot"])

Loss = Callable[[Any, Any, Any], Any]


def whole_model(model: Any, full_graph: bool) -> Loss:
    static = paddle.jit.to_static(model, full_graph=full_graph)
    return lambda _model, ids, labels: F.cross_entropy(static(ids), labels)


def model_and_loss(model: Any, full_graph: bool) -> Loss:
    def step(input_ids: Any, labels: Any) -> Any:
        return F.cross_entropy(model(input_ids), labels)

    static = paddle.jit.to_static(step, full_graph=full_graph)
    return lambda _model, ids, labels: static(ids, labels)


def by_keyword(model: Any, full_graph: bool) -> Loss:
    def step(input_ids: Any, labels: Any) -> Any:
        return F.cross_entropy(model(input_ids), labels)

    static = paddle.jit.to_static(step, full_graph=full_graph)
    return lambda _model, ids, labels: static(labels=labels, input_ids=ids)


def model_alone(model: Any, full_graph: bool) -> Loss:
    def logits(x: Any) -> Any:
        return model(x)

    static = paddle.jit.to_static(logits, full_graph=full_graph)
    return lambda _model, ids, labels: F.cross_entropy(static(ids), labels)


def model_given(model: Any, full_graph: bool) -> Loss:
    def step(net: Any, input_ids: Any, labels: Any) -> Any:
        return F.cross_entropy(net(input_ids), labels)

    static = paddle.jit.to_static(step, full_graph=full_graph)
    return lambda _model, ids, labels: static(model, ids, labels)


def through_another_function(model: Any, full_graph: bool) -> Loss:
    def logits(tokens: Any) -> Any:
        return model(tokens)

    def step(input_ids: Any, labels: Any) -> Any:
        return F.cross_entropy(logits(input_ids), labels)

    static = paddle.jit.to_static(step, full_graph=full_graph)
    return lambda _model, ids, labels: static(ids, labels)


def part_of_the_model(model: Any, full_graph: bool) -> Loss:
    model.head = paddle.jit.to_static(model.head, full_graph=full_graph)
    return outside


def switching(model: Any, full_graph: bool, eager: Callable[[int], bool]) -> Loss:
    static, numbers = model_and_loss(model, full_graph), itertools.count()

    def loss(model: Any, ids: Any, labels: Any) -> Any:
        return (outside if eager(next(numbers)) else static)(model, ids, labels)

    return loss


def first_eager(model: Any, full_graph: bool) -> Loss:
    return switching(model, full_graph, lambda number: number < 3)


def every_other_eager(model: Any, full_graph: bool) -> Loss:
    return switching(model, full_graph, lambda number: number % 2 == 1)


SHAPES = pytest.mark.parametrize(
    "shape",
    [
        whole_model,
        model_and_loss,
        by_keyword,
        model_alone,
        model_given,
        through_another_function,
        part_of_the_model,
        first_eager,
        every_other_eager,
    ],
)


@SHAPES
@KINDS
def test_totals_equal_a_recount(stored: Stored, shape: Any, full_graph: bool) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    model = Model()
    recount, _ = train(shape(model, full_graph), dataset(8), model=model, accumulate=2)
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics()), (recount, stored.metrics())
    assert stored.points("tokens/computed")[-1][0] == 4


@SHAPES
@KINDS
def test_graphs_made_before_autolog_and_losses_to_the_bit(
    stored: Stored, shape: Any, full_graph: bool
) -> None:
    """The first call under SOT fixes the shapes and the next one does not: they differ by themselves."""
    paddle.seed(1)
    model = Model()
    loss_of, weights = shape(model, full_graph), {k: v.clone() for k, v in model.state_dict().items()}

    def run() -> Any:
        model.set_state_dict(weights)
        paddle.seed(7)
        return train(loss_of, dataset(6), model=model)

    run()
    _, without = run()
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=1)
    recount, losses = run()
    mlflow_tokens.autolog(disable=True)
    if shape is not first_eager:
        assert losses == without
    assert recount.equals(stored.metrics()), (recount, stored.metrics())


def test_a_function_whose_labels_are_not_told_by_name(stored: Stored) -> None:
    """The first array of ids is what the model is fed; of the second one nothing is known."""
    mlflow_tokens.autolog(pad_token_id=PAD)
    model = Model()

    def step(a: Any, b: Any) -> Any:
        return F.cross_entropy(model(a), b)

    static = paddle.jit.to_static(step, full_graph=True)
    recount, _ = train(lambda _model, ids, labels: static(ids, labels), dataset(4), model=model)
    mlflow_tokens.autolog(disable=True)
    metrics = stored.metrics()
    assert metrics["tokens/computed"] == recount.computed
    assert metrics["tokens/valid"] == recount.valid
    assert "tokens/trained" not in metrics


def warnings_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if " WARNING mlflow_tokens" in line]


def test_a_function_that_is_not_given_the_ids_is_unknown(
    stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    model = Model()
    ids = paddle.to_tensor([[7, 8, 9, PAD]])

    def step(factor: Any) -> Any:
        return F.cross_entropy(model(ids), ids) * factor

    static = paddle.jit.to_static(step, full_graph=True)
    train(lambda *_batch: static(paddle.ones([1])), dataset(4), model=model)
    mlflow_tokens.autolog(disable=True)
    assert not [name for name in stored.metrics() if name.startswith("tokens/")]
    (line,) = warnings_in(capsys.readouterr().err)
    assert "step was called with" in line
    assert "mlflow_tokens.Tracker" in line


def test_a_function_whose_model_cannot_be_found_is_unknown(
    stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    model = Model()
    hidden = {"a": {"b": {"c": [model]}}}

    def step(input_ids: Any, labels: Any) -> Any:
        return F.cross_entropy(hidden["a"]["b"]["c"][0](input_ids), labels)

    static = paddle.jit.to_static(step, full_graph=True)
    train(lambda _model, ids, labels: static(ids, labels), dataset(4), model=model)
    mlflow_tokens.autolog(disable=True)
    assert not stored.runs()
    (line,) = warnings_in(capsys.readouterr().err)
    assert "AdamW" in line
    assert "mlflow_tokens.Tracker" in line


@KINDS
def test_evaluation_through_a_static_function_is_not_training(stored: Stored, full_graph: bool) -> None:
    tracker = mlflow_tokens.autolog(pad_token_id=PAD)
    assert tracker is not None
    model = Model()
    static = model_and_loss(model, full_graph)
    ids, labels = map(paddle.to_tensor, dataset(1)[0])
    recount, _ = train(static, dataset(3), model=model)
    model.eval()
    static(model, ids, labels)
    assert tracker.meter.clock.phase == "eval"
    model.train()
    with paddle.no_grad():
        static(model, ids, labels)
    again, _ = train(static, dataset(2), model=model)
    mlflow_tokens.autolog(disable=True)
    metrics = stored.metrics()
    assert metrics["tokens/computed"] == recount.computed + again.computed
    assert metrics["tokens/trained"] == recount.trained + again.trained


class WithStep(Model):
    """A model with a method besides `forward` that is a static graph."""

    @paddle.jit.to_static(full_graph=True)  # type: ignore[untyped-decorator]
    def loss(self, input_ids: Any, labels: Any) -> Any:
        return F.cross_entropy(self.forward(input_ids), labels)


def test_another_method_of_the_model(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    recount, _ = train(lambda model, ids, labels: model.loss(ids, labels), dataset(4), model=WithStep())
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())


class Around(nn.Layer):
    """A model that calls a static function around its inner model in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()

        def logits(input_ids: Any) -> Any:
            return self.inner(input_ids)

        self.logits = paddle.jit.to_static(logits, full_graph=True)

    def forward(self, input_ids: Any) -> Any:
        return self.logits(input_ids)


def test_a_static_function_within_the_model_counts_nothing_twice(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    recount, _ = train(outside, dataset(4), model=Around())
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())


def test_a_static_function_without_a_model_counts_nothing(stored: Stored) -> None:
    """Ids that are masked at random before they are trained on."""
    mlflow_tokens.autolog(pad_token_id=PAD)

    def mask(input_ids: Any) -> Any:
        return paddle.where(input_ids == 7, paddle.full_like(input_ids, 8), input_ids)

    static = paddle.jit.to_static(mask, full_graph=True)
    recount, _ = train(lambda model, ids, labels: outside(model, static(ids), labels), dataset(4))
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())


def test_a_teacher_in_the_same_function(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    student, teacher = Model(), Model()
    teacher.eval()

    def step(input_ids: Any, labels: Any) -> Any:
        with paddle.no_grad():
            goal = teacher(input_ids)
        logits = student(input_ids)
        return F.cross_entropy(logits, labels) + F.mse_loss(logits, goal)

    static = paddle.jit.to_static(step, full_graph=True)
    recount, _ = train(lambda _model, ids, labels: static(ids, labels), dataset(4), model=student)
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())
