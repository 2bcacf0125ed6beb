"""Pipeline parallel models, whose layers a schedule calls one by one: their data is seen before it runs.

Every stage is given the data and counts it, so that its steps go on; only the first stage's tokens are added
up (see `topology`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import paddle
from paddle.distributed.fleet.meta_parallel import pipeline_parallel

from mlflow_tokens.counting import BatchCounts, Fields, find_fields, is_array
from mlflow_tokens.paddle.model_hooks import ModelHooks
from mlflow_tokens.patches import Patches
from mlflow_tokens.tracker import Tracker

_CLASSES = ("PipelineParallel", "NoPipelineParallel")


class PipelineHooks:
    """Counts what `train_batch`, or a Trainer in its place, hands to a pipeline."""

    def __init__(self, tracker: Tracker, models: ModelHooks) -> None:
        self._tracker = tracker
        self._models = models
        self._patches = Patches()

    def install(self) -> None:
        """Wrap what both ways to train a pipeline begin with, and its evaluation."""
        for cls in (getattr(pipeline_parallel, name, None) for name in _CLASSES):
            if cls is not None:
                self._patches.wrap(cls, "_prepare_training", self._training_prepared)
                self._patches.wrap(cls, "eval_batch", self._evaluated)

    def remove(self) -> None:
        """Put everything back."""
        self._patches.revert()

    def _training_prepared(self, original: Any, model: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(model, data, *args, **kwargs)
        try:
            with paddle.no_grad():
                for counts in self._count(data, model.accumulate_steps):
                    self._models.feed(model._layers, counts)
        except Exception as error:
            self._tracker.counting_failed(error)
        return result

    def _evaluated(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        self._tracker.evaluates()
        return original(model, *args, **kwargs)

    def _count(self, data: Any, steps: int) -> Iterator[BatchCounts]:
        if data is None:  # of a stage in the middle
            yield BatchCounts(0, 0, 0)
        elif not isinstance(data, tuple | list) or len(data) != 2:
            yield BatchCounts(
                None,
                None,
                None,
                reason=f"a pipeline's data is a {type(data).__name__}, which is read as it trains; give it "
                "(inputs, labels), or count by hand with mlflow_tokens.Tracker",
            )
        else:
            for inputs, labels in zip(
                _micro_batches(data[0], steps), _micro_batches(data[1], steps), strict=False
            ):
                fields = _with_labels(find_fields(inputs), labels)
                yield self._tracker.of_source(self._tracker.count_fields(fields))


def _micro_batches(given: Any, steps: int) -> Iterator[Any]:
    """The micro-batches of one step, where they come apart; else all of them in one."""
    if isinstance(given, list):
        yield from given
    elif isinstance(given, tuple) and any(isinstance(item, list) for item in given):
        for step in range(steps):
            yield tuple(item[step] if isinstance(item, list) else item for item in given)
    elif isinstance(given, Mapping) and any(isinstance(item, list) for item in given.values()):
        for step in range(steps):
            yield {name: item[step] if isinstance(item, list) else item for name, item in given.items()}
    else:
        yield given


def _with_labels(fields: Fields, labels: Any) -> Fields:
    while isinstance(labels, tuple | list) and labels:
        labels = labels[0]
    if isinstance(labels, Mapping):
        labels = find_fields(labels).labels
    return fields._replace(labels=labels) if is_array(labels) else fields
