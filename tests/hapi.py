"""A `paddle.Model` over padded texts, and what it is fed: by hand, and by plain loops over plain lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from tests.loops import PAD, VOCABULARY, Recount

#: Batches of 4, each padded to its longest row: 4 x 6, 4 x 7 and 2 x 6 positions, of which 18, 17 and 10
#: hold text. The first two tokens of a row are its prompt: 10, 9 and 6 labels are trained on.
LENGTHS = (3, 5, 4, 6, 2, 7, 5, 3, 6, 4)
ROWS = 4
COMPUTED, VALID, TRAINED = (24, 28, 12), (18, 17, 10), (10, 9, 6)


def text(index: int) -> list[int]:
    """The tokens of a row."""
    return [4 + (7 * index + place) % (VOCABULARY - 4) for place in range(LENGTHS[index])]


def padded(indices: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Ids and labels of a batch."""
    texts = [text(index) for index in indices]
    width = max(map(len, texts))
    ids = [row + [PAD] * (width - len(row)) for row in texts]
    labels = [[-100, -100, *row[2:]] + [-100] * (width - len(row)) for row in texts]
    return ids, labels


def batches() -> list[tuple[list[list[int]], list[list[int]]]]:
    """All batches of an epoch."""
    starts = range(0, len(LENGTHS), ROWS)
    return [padded(range(start, min(start + ROWS, len(LENGTHS)))) for start in starts]


def recount(epochs: int) -> Recount:
    """What so many epochs feed to the model."""
    counted = Recount()
    for _ in range(epochs):
        for ids, labels in batches():
            counted.add(ids, labels)
    return counted


class Indices(paddle.io.Dataset):
    """The number of each row; `collate` makes batches of them."""

    def __init__(self, rows: int = len(LENGTHS)) -> None:
        self._rows = rows

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self._rows


def loader(rows: int = len(LENGTHS), **options: Any) -> Any:
    """Batches of the first rows."""

    def collate(indices: list[int]) -> list[Any]:
        return [np.array(part, dtype="int64") for part in padded(indices)]

    return paddle.io.DataLoader(Indices(rows), batch_size=ROWS, collate_fn=collate, **options)


class Network(nn.Layer):
    """A language model. MLflow's summary of it calls it with floats, which an embedding refuses."""

    def __init__(self, *, takes_floats: bool = True) -> None:
        super().__init__()
        self._takes_floats = takes_floats
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Any) -> Any:
        ids = input_ids.astype("int64") if self._takes_floats else input_ids
        return self.head(self.dropout(self.embedding(ids)))


def hapi_model(network: Any = None, loss: Any = None, **options: Any) -> Any:
    """A model that is prepared. options: of `Model.prepare`.

    MLflow's summary of it can be made of a fixed width alone; batches may be narrower.
    """
    ids = paddle.static.InputSpec([None, max(LENGTHS)], "int64", "input_ids")
    labels = paddle.static.InputSpec([None, max(LENGTHS)], "int64", "labels")
    paddle.utils.unique_name.switch()  # names are given as in a new process
    model = paddle.Model(network or Network(), [ids], [labels])
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    model.prepare(optimizer, loss or nn.CrossEntropyLoss(), **options)
    return model


def fit(model: Any, epochs: int = 1, *, save_dir: Path | None = None, **options: Any) -> None:
    """Train it on all rows, in their order."""
    folder = None if save_dir is None else str(save_dir)
    model.fit(loader(), epochs=epochs, verbose=0, save_dir=folder, **options)


def callback(**calls: Any) -> Any:
    """A callback of the script's own. calls: what it does, by the name of its method."""
    made = paddle.callbacks.Callback()
    for name, call in calls.items():
        setattr(made, name, call)
    return made


def totals(metrics: Mapping[str, float]) -> list[float | None]:
    """What a run says in the end."""
    return [metrics.get(f"tokens/{kind}") for kind in ("computed", "valid", "trained", "effective")]
