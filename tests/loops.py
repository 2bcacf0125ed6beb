"""A tiny language model, padded batches, a raw loop and a recount that shares no code with the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

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
