"""Labels on their way into a loss: counted, or unknown, and never wrong.

Every batch has two rows of 3 ids; the labels that are trained on are given by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.functional import cross_entropy as imported_before_autolog

import mlflow_tokens
from tests.conftest import Stored
from tests.loops import PAD, VOCABULARY

IDS = [[7, 8, 9], [10, 11, PAD]]
STEPS = 3


class Language(nn.Layer):
    """A model that gives logits, or hidden states; with dropout, so that random numbers matter."""

    def __init__(self, logits: bool = True) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(VOCABULARY, 8), nn.Dropout(0.2)
        self.head = nn.Linear(8, VOCABULARY) if logits else nn.Identity()

    def forward(self, input_ids: Any) -> Any:
        return self.head(self.dropout(self.embedding(input_ids)))


def run(loss_of: Callable[[Any, Any], Any], labels: Any, model: Any = None) -> list[float]:
    paddle.seed(3)
    model = model or Language()
    optimizer = paddle.optimizer.SGD(1e-1, parameters=model.parameters())
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model(paddle.to_tensor(IDS)), paddle.to_tensor(labels))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses


def trained(stored: Stored, loss_of: Any, labels: Any, model: Callable[[], Any] = Language) -> float | None:
    """Trained tokens of one batch, with losses the same to the bit as without us."""
    paddle.seed(2)
    models = [model(), model()]
    models[1].set_state_dict(models[0].state_dict())
    without = run(loss_of, labels, models[0])
    mlflow_tokens.autolog(pad_token_id=PAD)
    assert run(loss_of, labels, models[1]) == without
    mlflow_tokens.autolog(disable=True)
    metrics = stored.metrics()
    assert (metrics["tokens/computed"], metrics["tokens/valid"]) == (6 * STEPS, 5 * STEPS)
    total = metrics.get("tokens/trained")
    return None if total is None else total / STEPS


def plain(logits: Any, labels: Any) -> Any:
    return F.cross_entropy(logits, labels)


# Two labels of -100, one of 0.
LABELS = [[-100, 8, 9], [0, 11, -100]]
COLUMN = [[[label] for label in row] for row in LABELS]
ZERO = [[0, 8, 9], [0, 11, 0]]
ONES = [1.0] * VOCABULARY


@pytest.mark.parametrize(
    ("loss_of", "labels", "expected"),
    [
        (plain, LABELS, 4),
        (lambda x, y: F.cross_entropy(input=x, label=y), LABELS, 4),
        (lambda x, y: F.cross_entropy(x, label=y), COLUMN, 4),
        (lambda x, y: F.cross_entropy(x, target=y), LABELS, 4),
        (plain, COLUMN, 4),
        (lambda x, y: F.cross_entropy(x.reshape([-1, VOCABULARY]), y.reshape([-1])), LABELS, 4),
        (lambda x, y: F.cross_entropy(x.reshape([-1, VOCABULARY]), y.reshape([-1, 1])), LABELS, 4),
        (lambda x, y: F.cross_entropy(x, y.astype("int32")), LABELS, 4),
        (lambda x, y: F.cross_entropy(x, y, ignore_index=0), ZERO, 3),
        (lambda x, y: F.cross_entropy(x, y, None, 0), ZERO, 3),
        (lambda x, y: F.cross_entropy(x, y, reduction="none").mean(), LABELS, 4),
        (lambda x, y: F.cross_entropy(x, y, weight=paddle.to_tensor(ONES)), LABELS, 4),
        (lambda x, y: F.cross_entropy(x, y, paddle.to_tensor(ONES), 0), ZERO, 3),
        (lambda x, y: F.cross_entropy(F.softmax(x), y, use_softmax=False), LABELS, 4),
        (lambda x, y: F.cross_entropy(x.transpose([0, 2, 1]), y, axis=1), LABELS, 4),
        (nn.CrossEntropyLoss(), LABELS, 4),
        (nn.CrossEntropyLoss(), COLUMN, 4),
        (nn.CrossEntropyLoss(ignore_index=0), ZERO, 3),
        (nn.CrossEntropyLoss(None, 0), ZERO, 3),
        (nn.CrossEntropyLoss(weight=paddle.to_tensor(ONES)), LABELS, 4),
        (lambda x, y: F.softmax_with_cross_entropy(x, y).mean(), COLUMN, 4),
        (lambda x, y: F.softmax_with_cross_entropy(x, y, ignore_index=0).mean(), [[[0], [8], [9]]] * 2, 4),
        (lambda x, y: F.softmax_with_cross_entropy(x, y, False, 0).mean(), [[[0], [8], [9]]] * 2, 4),
        (lambda x, y: F.nll_loss(F.log_softmax(x).transpose([0, 2, 1]), y), LABELS, 4),
        (lambda x, y: nn.NLLLoss(ignore_index=0)(F.log_softmax(x).transpose([0, 2, 1]), y), ZERO, 3),
        (
            lambda x, y: F.nll_loss(F.log_softmax(x).reshape([-1, VOCABULARY]), y.reshape([-1]), None, 0),
            ZERO,
            3,
        ),
        # The shift of a language model: one label a row fewer.
        (lambda x, y: F.cross_entropy(x[:, :-1], y[:, 1:]), LABELS, 3),
    ],
)  # fmt: skip
def test_labels_of_a_loss_are_counted(stored: Stored, loss_of: Any, labels: Any, expected: int) -> None:
    assert trained(stored, loss_of, labels) == expected


def margin(cosines: Any, label: Any, *_margins: Any, **_options: Any) -> Any:
    """Stands in for Paddle's, which there is for GPUs alone."""
    return -F.log_softmax(cosines).take_along_axis(label.reshape([-1, 1]), -1).mean()


def through_margin(hidden: Any, y: Any) -> Any:
    return F.margin_cross_entropy(hidden.reshape([-1, 8]), y.reshape([-1]) % 8)


def through_a_tree(hidden: Any, y: Any) -> Any:
    paddle.seed(1)
    return nn.HSigmoidLoss(8, VOCABULARY)(hidden.reshape([-1, 8]), y.reshape([-1, 1])).mean()


def adaptive(hidden: Any, y: Any) -> Any:
    paddle.seed(1)
    loss = nn.AdaptiveLogSoftmaxWithLoss(8, VOCABULARY, [20])
    return loss(hidden.reshape([-1, 8]), y.reshape([-1]))[1]


@pytest.mark.parametrize("loss_of", [through_margin, through_a_tree, adaptive])
def test_losses_that_ignore_no_label(stored: Stored, monkeypatch: pytest.MonkeyPatch, loss_of: Any) -> None:
    """A margin softmax, a tree of classes and an adaptive softmax train on every label."""
    monkeypatch.setattr(F, "margin_cross_entropy", margin)
    assert trained(stored, loss_of, [[7, 8, 9], [0, 11, 12]], lambda: Language(logits=False)) == 6


SOFT = [[[1.0 / VOCABULARY] * VOCABULARY] * 3] * 2


@pytest.mark.parametrize(
    ("loss_of", "labels"),
    [
        (lambda x, y: F.cross_entropy(x, y, soft_label=True), SOFT),
        (lambda x, y: F.softmax_with_cross_entropy(x, y, True).mean(), SOFT),
        (nn.CrossEntropyLoss(soft_label=True), SOFT),
        # Smoothed one-hot labels.
        (lambda x, y: F.cross_entropy(x, F.label_smooth(F.one_hot(y, VOCABULARY)), soft_label=True), ZERO),
        # A class a row.
        (lambda x, y: F.cross_entropy(x[:, 0], y), [1, 0]),
        # Labels of the positions that are masked, as of a BERT.
        (lambda x, y: F.cross_entropy(x.reshape([-1, VOCABULARY])[:2], y), [1, 0]),
        # What is compared here are no labels.
        (lambda x, y: F.mse_loss(x, F.one_hot(y, VOCABULARY)), ZERO),
        (lambda x, y: F.kl_div(F.log_softmax(x), F.one_hot(y, VOCABULARY)), ZERO),
        (lambda x, y: F.binary_cross_entropy_with_logits(x[..., 0], (y > 5).astype("float32")), ZERO),
        # A loss of the script's own.
        (lambda x, y: -F.log_softmax(x).take_along_axis(y.unsqueeze(-1), -1).mean(), ZERO),
        # A function that was imported by its name before autolog() replaced it.
        (lambda x, y: imported_before_autolog(x, y, ignore_index=0), ZERO),
    ],
)
def test_what_is_not_one_label_a_token_is_unknown(stored: Stored, loss_of: Any, labels: Any) -> None:
    assert trained(stored, loss_of, labels) is None


def test_the_first_of_two_losses_counts(stored: Stored) -> None:
    def both(logits: Any, labels: Any) -> Any:
        return F.cross_entropy(logits, labels, ignore_index=0) + 0.1 * F.cross_entropy(logits, labels)

    assert trained(stored, both, ZERO) == 3


def test_a_loss_imported_before_beside_one_that_is_seen(stored: Stored) -> None:
    """Only the seen one's labels are known to be labels; they are the same ones."""

    def both(logits: Any, labels: Any) -> Any:
        return imported_before_autolog(logits, labels) + F.cross_entropy(logits, labels)

    assert trained(stored, both, LABELS) == 4


class Inside(Language):
    """Labels go into the model; the loss in it leaves another label out than `autolog()` is told."""

    def __init__(self, ignore_index: int) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        return F.cross_entropy(super().forward(input_ids), labels, ignore_index=self.ignore_index)


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize(
    ("told", "ignored", "expected"),
    # -100 and 0 of the labels; -100 is what nobody has said, so that the loss knows better.
    [(-100, -100, 4), (0, 0, 3), (-100, 0, None)],
)
def test_labels_inside_the_model(
    stored: Stored, by_name: bool, told: int, ignored: int, expected: int | None
) -> None:
    labels = paddle.to_tensor(LABELS if ignored == -100 else ZERO)
    model = Inside(ignored)
    optimizer = paddle.optimizer.SGD(1e-1, parameters=model.parameters())
    mlflow_tokens.autolog(pad_token_id=PAD, ignore_index=told)
    for _ in range(STEPS):
        ids = paddle.to_tensor(IDS)
        (model(ids, labels=labels) if by_name else model(ids, labels)).backward()
        optimizer.step()
        optimizer.clear_grad()
    mlflow_tokens.autolog(disable=True)
    metrics = stored.metrics()
    assert metrics["tokens/computed"] == 6 * STEPS
    assert metrics.get("tokens/trained") == (None if expected is None else expected * STEPS)


def test_accumulated_micro_batches_each_with_another_loss(stored: Stored) -> None:
    """Four labels of the first, three of the second, in each of three steps."""
    mlflow_tokens.autolog(pad_token_id=PAD)
    model = Language()
    optimizer = paddle.optimizer.SGD(1e-1, parameters=model.parameters())
    for _ in range(STEPS):
        F.cross_entropy(model(paddle.to_tensor(IDS)), paddle.to_tensor(LABELS)).backward()
        logits = F.log_softmax(model(paddle.to_tensor(IDS))).transpose([0, 2, 1])
        F.nll_loss(logits, paddle.to_tensor(ZERO), ignore_index=0).backward()
        optimizer.step()
        optimizer.clear_grad()
    mlflow_tokens.autolog(disable=True)
    assert stored.metrics()["tokens/trained"] == (4 + 3) * STEPS
