"""Sees optimizers being made and stepping, and checkpoints being written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import paddle

from mlflow_tokens.paddle.model_hooks import ModelHooks
from mlflow_tokens.patches import Patches
from mlflow_tokens.tracker import Tracker


class StepHooks:
    """Ends a step of the tracker whenever an optimizer has updated a model of ours.

    An update that follows no new micro-batch is no step of its own: of two optimizers over one model
    the first one ends the step, and an averaging optimizer ends none.
    """

    def __init__(self, tracker: Tracker, models: ModelHooks, before_step_ends: Callable[[], None]) -> None:
        self._tracker = tracker
        self._models = models
        self._before_step_ends = before_step_ends
        self._inside = threading.local()
        self._patches = Patches()
        self._wrapped: set[type[Any]] = set()

    def install(self) -> None:
        """Wrap `__init__`, `step` and `minimize` of every optimizer class, and `paddle.save`."""
        for cls in optimizer_classes():
            self._wrap(cls)
        self._patches.wrap(paddle, "save", self._save_called)

    def remove(self) -> None:
        """Put everything back."""
        self._patches.revert()
        self._wrapped.clear()

    def _wrap(self, cls: type[Any]) -> None:
        self._wrapped.add(cls)
        # Not every class calls its base's constructor (AdamW does not).
        if "__init__" in vars(cls):
            self._patches.wrap(cls, "__init__", self._optimizer_made)
        for name in ("step", "minimize"):
            if name in vars(cls):
                self._patches.wrap(cls, name, self._optimizer_called)

    def _optimizer_made(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(optimizer, *args, **kwargs)
        try:
            for cls in type(optimizer).__mro__:
                # A class that the script has written since.
                if cls not in self._wrapped and issubclass(cls, paddle.optimizer.Optimizer):
                    self._wrap(cls)
            self._models.optimizer_made(optimizer)
        except Exception as error:
            self._tracker.counting_failed(error)
        return result

    def _optimizer_called(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self._inside, "value", False):
            return original(optimizer, *args, **kwargs)
        self._inside.value = True
        try:
            result = original(optimizer, *args, **kwargs)
        finally:
            self._inside.value = False
        try:
            self._before_step_ends()
            if (
                paddle.in_dynamic_mode()
                and self._models.optimizer_stepped(optimizer)
                and self._tracker.meter.in_step
            ):
                self._tracker.step_ended()
        except Exception as error:
            self._tracker.counting_failed(error)
        return result

    def _save_called(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with self._tracker.phase("checkpoint"):
            return original(*args, **kwargs)


def optimizer_classes() -> frozenset[type[Any]]:
    """Every optimizer class there is so far."""
    base = paddle.optimizer.Optimizer
    return frozenset((base, *_subclasses(base)))


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
