"""What may be a model that is trained, and what it was fed before an optimizer has shown it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from mlflow_tokens.counting import BatchCounts, Scalar, is_array

#: Micro-batches that a model may be fed before an optimizer steps; more were never meant to be trained.
PENDING_LIMIT = 4096


class Candidate:
    """A layer that may be a trained model, or a function around some, and what it was fed so far."""

    def __init__(self, called: Any, layers: Iterable[Any]) -> None:
        self.called = weakref.ref(called)
        self._layers = [weakref.ref(layer) for layer in layers]
        self.batches: list[BatchCounts] = []
        self._lent: list[tuple[BatchCounts, Scalar | None, Candidate]] = []
        self.without_tokens: deque[BatchCounts] = deque(maxlen=PENDING_LIMIT)
        """Micro-batches in which no token can be, and why nothing is known of them."""

    def add(self, counts: BatchCounts) -> None:
        """Keep what a micro-batch holds."""
        if len(self.batches) == PENDING_LIMIT:
            reason = f"{PENDING_LIMIT} micro-batches went by without an optimizer step"
            self.batches = [BatchCounts(None, None, None, reason=reason)]
        self.batches.append(counts)

    def fits(self, labels_size: int) -> bool:
        """Whether so many labels would fit the newest micro-batch."""
        return bool(self.batches) and labels_size in self.batches[-1].label_sizes

    def learn(self, trained: Scalar | None) -> None:
        """How many tokens of the newest micro-batch are trained on; None: unknown, whatever else is seen."""
        sizes = self.batches[-1].label_sizes if trained is not None else frozenset()
        self.batches[-1] = self.batches[-1]._replace(trained=trained, label_sizes=sizes)

    def may_learn(self, trained: Scalar | None, taker: Candidate) -> None:
        """Labels were taken for another one that was called since, which may turn out to be a teacher."""
        if self.batches[-1].trained is None:
            self._lent.append((self.batches[-1], trained, taker))

    def settle(self, trained_by: set[int]) -> None:
        """Take back the labels that others took which are not trained: these have none of the parameters."""
        lent = {id(counts): trained for counts, trained, taker in self._lent if not taker.trains(trained_by)}
        self.batches = [
            counts._replace(trained=lent[id(counts)]) if id(counts) in lent else counts
            for counts in self.batches
        ]
        self._lent.clear()

    @property
    def has_ids(self) -> bool:
        """Whether it was fed ids."""
        return any(counts.computed is not None for counts in self.batches)

    def trains(self, parameters: set[int]) -> bool:
        """Whether it has some of these parameters (by id)."""
        return bool(self.trained_by(parameters))

    def trained_by(self, parameters: set[int]) -> list[Any]:
        """Its layers that have some of these parameters (by id)."""
        layers = [layer for reference in self._layers if (layer := reference()) is not None]
        return [layer for layer in layers if not parameters.isdisjoint(map(id, layer.parameters()))]

    def parts(self) -> set[int]:
        """What is part of its layers, by id."""
        layers = [layer for reference in self._layers if (layer := reference()) is not None]
        return {id(part) for layer in layers for part in layer.sublayers()}


def leaders(found: list[Candidate]) -> list[Candidate]:
    """Those whose batches are the training data.

    Of a model called in several parts these are the parts that are fed ids; the others are fed what
    those made. A part that is called once more on its own is counted with the model it is part of.
    """
    found = [candidate for candidate in found if candidate.has_ids] or found
    parts = {part for candidate in found for part in candidate.parts()}
    return [candidate for candidate in found if id(candidate.called()) not in parts]


def outermost(layers: list[Any]) -> list[Any]:
    """Those layers that are not part of another one of them."""
    parts = {id(part) for layer in layers for part in layer.sublayers()}
    return [layer for layer in layers if id(layer) not in parts]


def holds_no_tokens(value: Any) -> bool:
    """Whether what a model was called with cannot hold tokens: floats, none of which is called an embedding.

    A generator is fed noise, and a discriminator what it made of that.
    """
    if is_array(value):
        return "int" not in str(value.dtype)
    if isinstance(value, Mapping):
        return all(
            holds_no_tokens(item) and (item is None or "embed" not in str(name))
            for name, item in value.items()
        )
    if isinstance(value, tuple | list):
        return all(map(holds_no_tokens, value))
    return value is None or isinstance(value, bool | int | float | str)
