"""One data set, however it is fed: the totals are always the same.

In one process here, and in several in test_hybrid_mixes. A sample of the combinations runs with every
test; all of them are marked long.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.nn import functional as F

import mlflow_tokens
from tests.conftest import Stored
from tests.corpus import PAD, RECOUNT, ROWS, ids_of, labels_of


@dataclass(frozen=True)
class Way:
    """A way to train on the corpus once. rows: of a micro-batch. stops: the job is ended and resumed."""

    loop: str
    rows: int
    accumulate: int
    recompute: bool
    amp: bool
    workers: int
    stops: bool

    def __str__(self) -> str:
        names = [name for name in ("recompute", "amp", "stops") if getattr(self, name)]
        return "-".join(
            [self.loop, f"rows{self.rows}", f"x{self.accumulate}", f"workers{self.workers}", *names]
        )


_ALL = [
    Way(*values)
    for values in itertools.product(
        ("raw", "inside", "static", "hapi", "hand"),
        (2, 8),
        (1, 3),
        (False, True),
        (False, True),
        (0, 1),
        (False, True),
    )
]
_SAMPLE = set(random.Random(1).sample(range(len(_ALL)), 24))
WAYS = [
    pytest.param(way, id=str(way), marks=[] if index in _SAMPLE else [pytest.mark.long])
    for index, way in enumerate(_ALL)
]


class Corpus(paddle.io.Dataset):
    """Some rows of the corpus."""

    def __init__(self, rows: range) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        row = self._rows[index]
        return np.array(ids_of(row)), np.array(labels_of(row))


class Network(nn.Layer):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self._way = way
        self.embedding = nn.Embedding(48, 8)
        self.block = nn.Linear(8, 8)
        self.head = nn.Linear(8, 48)

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        hidden = self.embedding(input_ids)
        hidden = recompute(self.block, hidden) if self._way.recompute else self.block(hidden)
        logits = self.head(hidden)
        return logits if labels is None else F.cross_entropy(logits, labels)


def train(way: Way, rows: range) -> None:
    """Feed these rows once, as a script would that knows nothing of us but one line, or of a Tracker."""
    network = Network(way)
    loader = paddle.io.DataLoader(Corpus(rows), batch_size=way.rows, num_workers=way.workers)
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=network.parameters())
    if way.loop == "hapi":
        given = [paddle.static.InputSpec([None, None], "int64", name) for name in ("input_ids", "labels")]
        model = paddle.Model(network, given[:1], given[1:])
        model.prepare(optimizer, nn.CrossEntropyLoss(), amp_configs={"level": "O1"} if way.amp else None)
        model.fit(loader, epochs=1, verbose=0, accumulate_grad_batches=way.accumulate)
        return
    model = paddle.jit.to_static(network) if way.loop == "static" else network
    scaler = paddle.amp.GradScaler(enable=way.amp)
    last = -(-len(rows) // way.rows)
    for number, (ids, labels) in enumerate(loader, start=1):
        if way.loop == "hand":
            tracker = mlflow_tokens.current()
            assert tracker is not None
            tracker.count({"input_ids": ids, "labels": labels})
        with paddle.amp.auto_cast(enable=way.amp, dtype="bfloat16"):
            loss = model(ids, labels) if way.loop == "inside" else F.cross_entropy(model(ids), labels)
        scaler.scale(loss).backward()
        if number % way.accumulate == 0 or number == last:
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()
            if way.loop == "hand":
                tracker.step()


def begin(way: Way) -> mlflow_tokens.Tracker:
    """A job's beginning."""
    make: Any = mlflow_tokens.Tracker if way.loop == "hand" else mlflow_tokens.autolog
    tracker: mlflow_tokens.Tracker = make(pad_token_id=PAD, log_every_steps=2, silent=True)
    return tracker


@pytest.mark.parametrize("way", WAYS)
def test_the_totals_are_those_of_the_data(stored: Stored, way: Way) -> None:
    tracker = begin(way)
    if way.stops:
        half = way.rows * way.accumulate * 2  # a whole number of steps
        train(way, range(half))
        state = tracker.state_dict()
        tracker.close()
        mlflow_tokens.autolog(disable=True)
        tracker = begin(way)
        tracker.load_state_dict(state)
        train(way, range(half, ROWS))
    else:
        train(way, range(ROWS))
    tracker.close()
    metrics = stored.metrics()
    assert {kind: metrics.get(f"tokens/{kind}") for kind in RECOUNT} == RECOUNT
    assert metrics["tokens/effective"] == RECOUNT["valid"]
