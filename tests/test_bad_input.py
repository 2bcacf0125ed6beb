"""What comes in malformed: what is logged then, and that training is not disturbed.

Each case trains with and without us; the losses must be the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

import mlflow_tokens
from tests.conftest import Stored

IDS = [[5, 6, 7, 0], [5, 6, 7, 8]]
LABELS = [[6, 7, -100, -100], [6, 7, 8, -100]]
STEPS = 12


class Flexible(nn.Layer):
    """Takes a batch in whatever form it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50)

    def forward(self, batch: Any, extra: Any = None, labels: Any = None) -> Any:
        while isinstance(batch, tuple | list | dict):
            batch = batch["input_ids"] if isinstance(batch, dict) else batch[0]
        if "float" in str(batch.dtype):
            return self.head(batch)
        return self.head(self.embedding(batch))


def losses(call: Callable[[Any], Any]) -> list[float]:
    paddle.seed(11)
    model = Flexible()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    seen = []
    for _ in range(STEPS):
        loss = call(model)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        seen.append(float(loss))
    return seen


def logged(stored: Stored, call: Callable[[Any], Any], **options: Any) -> list[float | None]:
    """Train without us, then with us; return tokens computed, valid, trained of one of the equal steps."""
    without = losses(call)
    mlflow_tokens.autolog(**options)
    assert losses(call) == without, "training was disturbed"
    mlflow_tokens.autolog(disable=True)
    metrics = stored.metrics()
    assert "device/hours" in metrics
    found = [metrics.get(f"tokens/{kind}") for kind in ("computed", "valid", "trained")]
    return [None if value is None else value / STEPS for value in found]


def labelled(logits: Any) -> Any:
    return F.cross_entropy(logits, paddle.to_tensor(LABELS))


def test_no_recognisable_ids(stored: Stored, capsys: pytest.CaptureFixture[str]) -> None:
    pixels = paddle.ones([2, 4, 8])
    assert logged(stored, lambda model: labelled(model(pixels))) == [None, None, None]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "unknown" in line]
    assert (
        "Tokens are unknown: no token ids were recognised in the batch that Flexible was called with" in line
    )
    assert "input_ids" in line and "mlflow_tokens.Tracker" in line


@pytest.mark.parametrize("names", [("image", "target"), ("x", "t"), ("x", "y"), ("input", "label")])
def test_classes_and_time_steps_are_not_tokens(stored: Stored, names: tuple[str, str]) -> None:
    class Vision(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 4)

    # The parameters of forward have the names that such models give them.
    first, second = names
    code = f"def forward(self, {first}, {second}): return self.head({first}).mean() + {second}.sum() * 0.0"
    space: dict[str, Any] = {}
    exec(code, space)
    Vision.forward = space["forward"]  # type: ignore[method-assign]
    mlflow_tokens.autolog(pad="none", silent=True)
    model = Vision()
    optimizer = paddle.optimizer.SGD(1e-2, parameters=model.parameters())
    for _ in range(3):
        model(paddle.ones([6, 8]), paddle.arange(6)).backward()
        optimizer.step()
    mlflow_tokens.autolog(disable=True)
    assert not [name for name in stored.metrics() if name.startswith("tokens/")]


def test_an_empty_batch(stored: Stored) -> None:
    def call(model: Any) -> Any:
        full = labelled(model(paddle.to_tensor(IDS)))
        return full + model(paddle.zeros([0, 4], "int64")).sum()

    # The empty one adds nothing, and nobody asks for its labels.
    assert logged(stored, call, pad_token_id=0)[:2] == [8, 7]


@pytest.mark.parametrize("padding", [0.0, -1e9, float("-inf")])
def test_a_float_mask(stored: Stored, padding: float) -> None:
    text = 1.0 if padding == 0.0 else 0.0
    mask = paddle.to_tensor([[text, text, text, padding], [text] * 4])

    def call(model: Any) -> Any:
        return labelled(model({"input_ids": paddle.to_tensor(IDS), "attention_mask": mask}))

    assert logged(stored, call) == [8, 7, 5]


def test_a_mask_of_four_dimensions_one_value_a_key(stored: Stored) -> None:
    mask = paddle.to_tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).reshape([2, 1, 1, 4])
    batch = {"input_ids": paddle.to_tensor(IDS), "attention_mask": mask}
    assert logged(stored, lambda model: labelled(model(batch))) == [8, 7, 5]


def test_a_mask_of_four_dimensions_query_by_key(stored: Stored) -> None:
    mask = paddle.to_tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).reshape([2, 1, 1, 4]) * paddle.ones(
        [2, 1, 4, 1], "int64"
    )
    batch = {"input_ids": paddle.to_tensor(IDS), "attention_mask": paddle.tril(mask)}
    assert logged(stored, lambda model: labelled(model(batch))) == [8, 7, 5]


def test_a_mask_of_four_dimensions_that_shows_no_padding(
    stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = {"input_ids": paddle.to_tensor(IDS), "attention_mask": paddle.ones([2, 1, 4, 4])}
    assert logged(stored, lambda model: labelled(model(batch))) == [8, None, 5]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "padding" in line]
    assert "Valid tokens are not logged until an attention mask shows padding" in line
    assert 'pad="none"' in line and "pad_token_id" in line


def test_positional_arguments_under_names_nobody_knows(stored: Stored) -> None:
    ids = paddle.to_tensor(IDS)
    assert logged(stored, lambda model: labelled(model(ids, paddle.ones([2, 4]))), pad_token_id=0) == [
        8,
        7,
        5,
    ]


@pytest.mark.parametrize("form", ["tuple", "list", "nested"])
def test_a_tuple_batch(stored: Stored, form: str) -> None:
    ids, labels = paddle.to_tensor(IDS), paddle.to_tensor(LABELS)
    batch: Any = {"tuple": (ids, labels), "list": [ids, labels], "nested": (({"input_ids": ids},), labels)}[
        form
    ]
    assert logged(stored, lambda model: labelled(model(batch)), pad_token_id=0) == [8, 7, 5]


def test_labels_that_nobody_sees_leave_trained_unknown(stored: Stored) -> None:
    def call(model: Any) -> Any:
        log_probabilities = F.log_softmax(model(paddle.to_tensor(IDS)))
        return -log_probabilities[:, :, 5].mean()

    assert logged(stored, call, pad_token_id=0) == [8, 7, None]


def test_a_class_a_row_is_not_a_trained_token(stored: Stored) -> None:
    def call(model: Any) -> Any:
        return F.cross_entropy(model(paddle.to_tensor(IDS)).mean(axis=1), paddle.to_tensor([1, 2]))

    assert logged(stored, call, pad_token_id=0) == [8, 7, None]


def test_without_padding_stated_valid_is_unknown_and_one_line_names_the_remedy(
    stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    assert logged(stored, lambda model: labelled(model(paddle.to_tensor(IDS)))) == [8, None, 5]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "unknown" in line]
    assert "pad_token_id" in line and 'pad="none"' in line


def test_packed_data(stored: Stored) -> None:
    assert logged(stored, lambda model: labelled(model(paddle.to_tensor(IDS))), pad="none") == [8, 8, 5]


def test_a_forward_that_fails_passes_its_error_on(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=0)
    model = Flexible()
    with pytest.raises(Exception, match=r"(?i)dim|shape|size"):
        model(paddle.ones([2, 4, 3]))
    assert paddle.is_grad_enabled()


def test_an_optimizer_that_fails_is_no_step(stored: Stored) -> None:
    class Failing(paddle.optimizer.SGD):
        def step(self) -> None:
            raise RuntimeError("out of memory")

    tracker = mlflow_tokens.autolog(pad_token_id=0)
    assert tracker is not None
    model = Flexible()
    optimizer = Failing(1e-2, parameters=model.parameters())
    labelled(model(paddle.to_tensor(IDS))).backward()
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    assert tracker.meter.current_step == 0


def test_a_sink_that_always_fails_costs_one_line_and_bounded_time(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow_tokens.sinks.mlflow import MlflowSink

    def refuse(*_: object) -> None:
        raise ConnectionError("the server is away")

    monkeypatch.setattr(MlflowSink, "write", refuse)
    without = losses(lambda model: labelled(model(paddle.to_tensor(IDS))))
    mlflow_tokens.autolog(pad_token_id=0, log_every_steps=1)
    assert losses(lambda model: labelled(model(paddle.to_tensor(IDS)))) == without
    mlflow_tokens.autolog(disable=True)
    lines = capsys.readouterr().err.splitlines()
    assert sum("the server is away" in line for line in lines) == 1
    assert sum("Not everything reached MLflow" in line and ".jsonl" in line for line in lines) == 1
    assert stored.runs() == []
