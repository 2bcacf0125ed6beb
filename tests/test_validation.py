"""Validation in the loop, done in every way that people do it: it is not training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle
import pytest
from paddle.nn import functional as F
from paddle.nn.functional import cross_entropy as imported_before_autolog

import mlflow_tokens
from tests.conftest import Stored
from tests.loops import PAD, Model, Recount, dataset, inside, outside


@contextmanager
def in_eval(model: Any) -> Iterator[None]:
    model.eval()
    yield
    model.train()


@contextmanager
def without_gradients(model: Any) -> Iterator[None]:
    with paddle.no_grad():
        yield


@contextmanager
def both(model: Any) -> Iterator[None]:
    with in_eval(model), paddle.no_grad():
        yield


WAYS = pytest.mark.parametrize("way", [in_eval, without_gradients, both])


def run(
    loss_of: Any, validate: Callable[[Any], None], at: str, wrap: Any = lambda model: model
) -> tuple[Recount, list[float]]:
    """Six micro-batches, two a step, with a validation before the first, after each step or within each."""
    paddle.seed(9)
    model = wrap(Model())
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    recount, losses = Recount(), []
    if at == "first":
        validate(model)
    for number, (ids, labels) in enumerate(dataset(6), start=1):
        loss = loss_of(model, paddle.to_tensor(ids), paddle.to_tensor(labels))
        loss.backward()
        losses.append(float(loss))
        recount.add(ids, labels)
        if number % 2 == 0:
            optimizer.step()
            optimizer.clear_grad()
            if at == "between":
                validate(model)
        elif at == "within":
            validate(model)
    return recount, losses


@WAYS
@pytest.mark.parametrize("at", ["first", "between", "within"])
@pytest.mark.parametrize("loss_of", [outside, inside])
@pytest.mark.parametrize("wrap", [lambda model: model, paddle.DataParallel], ids=["alone", "wrapped"])
def test_validation_counts_no_tokens(stored: Stored, way: Any, at: str, loss_of: Any, wrap: Any) -> None:
    batches = [tuple(map(paddle.to_tensor, batch)) for batch in dataset(3, seed=5)]

    def validate(model: Any) -> None:
        with way(model):
            for ids, labels in batches:
                loss_of(model, ids, labels)

    _, without = run(loss_of, validate, at, wrap)
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=1)
    recount, losses = run(loss_of, validate, at, wrap)
    mlflow_tokens.autolog(disable=True)
    assert losses == without
    assert recount.equals(stored.metrics()), (recount, stored.metrics())
    assert stored.points("tokens/computed")[-1][0] == 3


@WAYS
def test_labels_of_validation_are_not_taken_for_those_of_training(stored: Stored, way: Any) -> None:
    """The loss of training is not seen; that of validation is, of as many labels, before each step."""
    mlflow_tokens.autolog(pad_token_id=PAD)
    model, recount = Model(), Recount()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    for ids, labels in dataset(4):
        imported_before_autolog(model(paddle.to_tensor(ids)), paddle.to_tensor(labels)).backward()
        recount.add(ids, labels)
        with way(model):
            F.cross_entropy(model(paddle.to_tensor(ids)), paddle.to_tensor(labels))
        optimizer.step()
        optimizer.clear_grad()
    mlflow_tokens.autolog(disable=True)
    assert stored.metrics()["tokens/computed"] == recount.computed
    assert "tokens/trained" not in stored.metrics()
