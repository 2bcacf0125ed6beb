"""Forwards that are computed once more in backward: counted once, and computed as without us."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.recompute import recompute, recompute_sequential
from paddle.nn import functional as F

import mlflow_tokens
from tests.conftest import Stored
from tests.loops import PAD, VOCABULARY, Model, dataset, train


class Block(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Any) -> Any:
        return self.dropout(self.linear(x))


class InTuple(Block):
    """`recompute_sequential` hands over what a segment returns as arguments."""

    def forward(self, x: Any) -> Any:
        return (super().forward(x[0] if isinstance(x, tuple) else x),)


class Deep(nn.Layer):
    """An embedding, three blocks with dropout that may be computed once more in backward, and a head."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embedding = nn.Embedding(VOCABULARY, 8)
        block = InTuple if how == "segments" else Block
        self.blocks = nn.Sequential(block(), block(), block())
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Any, touched: Any = None, labels: Any = None) -> Any:
        x = self.embedding(input_ids)
        if touched is not None:
            x = x + touched
        if self.how == "segments":
            (x,) = recompute_sequential({"segments": 3}, self.blocks, x)
        elif self.how == "sequential":
            x = recompute_sequential({"segments": 1}, self.blocks, x)
        else:
            for block in self.blocks:
                if self.how in {"blocks", "both"}:
                    x = recompute(block, x, use_reentrant=True)
                elif self.how == "blocks without reentrance":
                    x = recompute(block, x, use_reentrant=False)
                else:
                    x = block(x)
        logits = self.head(x)
        return logits if labels is None else F.cross_entropy(logits, labels)


def touched() -> Any:
    """A reentrant recompute needs an argument that has a gradient, which ids have not."""
    zero = paddle.zeros([1])
    zero.stop_gradient = False
    return zero


def called(model: Any, ids: Any, labels: Any) -> Any:
    return F.cross_entropy(model(ids), labels)


def whole(model: Any, ids: Any, labels: Any) -> Any:
    return F.cross_entropy(recompute(model, ids, use_reentrant=False), labels)


def whole_reentrant(model: Any, ids: Any, labels: Any) -> Any:
    return F.cross_entropy(recompute(model, ids, touched(), use_reentrant=True), labels)


def whole_reentrant_by_default(model: Any, ids: Any, labels: Any) -> Any:
    return F.cross_entropy(recompute(model, ids, touched()), labels)


def whole_with_its_loss(model: Any, ids: Any, labels: Any) -> Any:
    return recompute(model, ids, touched(), labels, use_reentrant=True)


def loss_and_all(model: Any, ids: Any, labels: Any) -> Any:
    """A function of the script's own is recomputed, the loss in it."""

    def forward(zero: Any) -> Any:
        return F.cross_entropy(model(ids, zero), labels)

    return recompute(forward, touched(), use_reentrant=True)


@pytest.mark.parametrize(
    ("how", "loss_of"),
    [
        ("blocks", called),
        ("blocks without reentrance", called),
        ("segments", called),
        ("sequential", called),
        ("nothing", whole),
        ("nothing", whole_reentrant),
        ("nothing", whole_reentrant_by_default),
        ("nothing", whole_with_its_loss),
        ("nothing", loss_and_all),
        ("both", whole_reentrant),
        ("both", loss_and_all),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_counted_once_and_losses_the_same_to_the_bit(
    stored: Stored, how: str, loss_of: Any, accumulate: int
) -> None:
    def run() -> Any:
        paddle.seed(11)
        recount, losses = train(loss_of, dataset(6), model=Deep(how), accumulate=accumulate)
        return recount, losses, float(paddle.rand([1]))

    _, *without = run()
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=1)
    recount, *with_us = run()
    mlflow_tokens.autolog(disable=True)
    assert with_us == without
    assert recount.equals(stored.metrics()), (recount, stored.metrics())
    assert stored.points("tokens/computed")[-1][0] == 6 // accumulate


@pytest.mark.parametrize("reentrant", [True, False])
def test_validation_of_a_model_that_recomputes_is_not_training(stored: Stored, reentrant: bool) -> None:
    """Without gradients and left in training mode, through `recompute` all the same."""
    tracker = mlflow_tokens.autolog(pad_token_id=PAD)
    assert tracker is not None
    model = Deep("nothing")
    loss_of = whole_reentrant if reentrant else whole
    ids, labels = map(paddle.to_tensor, dataset(1)[0])
    recount, _ = train(loss_of, dataset(3), model=model)
    with paddle.no_grad():
        loss_of(model, ids, labels)
    assert tracker.meter.clock.phase == "eval"
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())


def test_a_teacher_within_what_is_recomputed_is_not_trained(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    teacher = Model()

    def distil(model: Any, ids: Any, labels: Any) -> Any:
        def forward(zero: Any) -> Any:
            with paddle.no_grad():
                goal = teacher(ids)
            logits = model(ids, zero)
            return F.cross_entropy(logits, labels) + F.mse_loss(logits, goal)

        return recompute(forward, touched(), use_reentrant=True)

    recount, _ = train(distil, dataset(4), model=Deep("nothing"))
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())


def test_recomputation_is_put_back_as_it_was(stored: Stored) -> None:
    from paddle.distributed.fleet.recompute.recompute import RecomputeFunction

    before = RecomputeFunction.apply
    mlflow_tokens.autolog()
    assert "apply" in vars(RecomputeFunction)
    mlflow_tokens.autolog(disable=True)
    assert "apply" not in vars(RecomputeFunction)
    assert RecomputeFunction.apply == before
