"""Sees optimizers being made and stepping, and checkpoints being written."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from typing import Any

import paddle
from paddle.amp.grad_scaler import AmpScaler
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import dygraph_sharding_optimizer
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer import (
    HybridParallelOptimizer,
)

from mlflow_tokens.notices import say_once
from mlflow_tokens.paddle.model_hooks import ModelHooks
from mlflow_tokens.patches import Patches
from mlflow_tokens.tracker import Tracker

#: Not optimizers themselves. Those for sharding update slices without asking the optimizer to step.
_WRAPPERS: tuple[type[Any], ...] = (
    HybridParallelOptimizer,
    *(
        getattr(dygraph_sharding_optimizer, name)
        for name in ("DygraphShardingOptimizer", "DygraphShardingOptimizerV2")
        if hasattr(dygraph_sharding_optimizer, name)
    ),
)

_STATIC = (
    "An optimizer has become part of a static graph, whose steps are not seen (paddle.enable_static()): the "
    "tokens of it are not counted. Train in dynamic mode, or count by hand with mlflow_tokens.Tracker."
)


class StepHooks:
    """Ends a step of the tracker whenever an optimizer has updated a model of ours.

    An update that follows no new micro-batch is no step of its own: of two optimizers over one model
    the first one ends the step, and an averaging optimizer ends none.

    A step that the optimizer leaves out because a loss scaler has found inf or nan is skipped. Paddle reads
    on the host what the scaler has found, and leaves the answer where it is looked up here. Where several
    optimizers train, another one may still update the model: then the answer waits for what comes next.
    """

    def __init__(self, tracker: Tracker, models: ModelHooks, before_step_ends: Callable[[], None]) -> None:
        self._tracker = tracker
        self._models = models
        self._before_step_ends = before_step_ends
        self._inside = threading.local()
        self._left_out = False
        models.before_batch = self.settle
        self._patches = Patches()
        self._wrapped: set[type[Any]] = set()

    def install(self) -> None:
        """Wrap `__init__`, `step` and `minimize` of every optimizer and scaler class, and `paddle.save`."""
        for cls in (*optimizer_classes(), *_WRAPPERS):
            self._wrap(cls)
        for cls in (AmpScaler, *_subclasses(AmpScaler)):
            self._wrap_scaler(cls)
        atexit.register(self.settle)

    def remove(self) -> None:
        """Put everything back."""
        self.settle()
        atexit.unregister(self.settle)
        self._patches.revert()
        self._wrapped.clear()

    def settle(self) -> None:
        """No other optimizer will end the step that one has left out: it is skipped."""
        if self._left_out:
            self._left_out = False
            if self._tracker.meter.in_step:
                self._tracker.step_skipped()

    def _wrap(self, cls: type[Any]) -> None:
        self._wrapped.add(cls)
        # Not every class calls its base's constructor (AdamW does not).
        if "__init__" in vars(cls) and cls not in _WRAPPERS:
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
        inside = self._inside
        if getattr(inside, "optimizer", False):
            result = original(optimizer, *args, **kwargs)
            # A wrapper of another optimizer asks nobody; the one within decides.
            inside.left_out = inside.left_out or _has_left_out(optimizer)
            return result
        inside.optimizer, inside.left_out = True, False
        try:
            result = original(optimizer, *args, **kwargs)
        finally:
            inside.optimizer = False
        inside.stepped = True
        try:
            self._before_step_ends()
            if self._patches.active and paddle.in_dynamic_mode():
                self._optimizer_stepped(optimizer, inside.left_out or _has_left_out(optimizer))
            elif self._patches.active:
                say_once("static", _STATIC)
        except Exception as error:
            self._tracker.counting_failed(error)
        return result

    def _optimizer_stepped(self, optimizer: Any, left_out: bool) -> None:
        wrapper, optimizer = optimizer, _innermost(optimizer)
        if not self._models.optimizer_stepped(optimizer, wrapper) or not self._tracker.meter.in_step:
            return
        if not left_out:
            self._left_out = False
            self._tracker.step_ended()
            return
        self._left_out = True
        if not self._models.others_train(optimizer):
            self.settle()

    def _wrap_scaler(self, cls: type[Any]) -> None:
        self._wrapped.add(cls)
        for name, wrapper in (
            ("__init__", self._scaler_made),
            ("step", self._scaler_called),
            ("minimize", self._scaler_called),
            ("update", self._scaler_updated),
        ):
            if name in vars(cls):
                self._patches.wrap(cls, name, wrapper)

    def _scaler_made(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        try:
            for cls in type(scaler).__mro__:
                # A class that the script has written since.
                if cls not in self._wrapped and issubclass(cls, AmpScaler):
                    self._wrap_scaler(cls)
        except Exception as error:
            self._tracker.counting_failed(error)
        return result

    def _scaler_called(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """An optimizer that is not asked to step was left out by the scaler itself."""
        inside = self._inside
        if getattr(inside, "scaler", False):
            return original(scaler, optimizer, *args, **kwargs)
        inside.scaler, inside.stepped = True, False
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            inside.scaler = False
        try:
            if not inside.stepped and paddle.in_dynamic_mode() and _leaves_out(scaler, optimizer):
                self._before_step_ends()
                if self._patches.active:
                    self._optimizer_stepped(optimizer, left_out=True)
        except Exception as error:
            self._tracker.counting_failed(error)
        return result

    def _scaler_updated(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        try:
            self.settle()
        except Exception as error:
            self._tracker.counting_failed(error)
        return result


def _innermost(optimizer: Any) -> Any:
    """The optimizer itself, where fleet has wrapped it."""
    while type(optimizer) in _WRAPPERS:
        optimizer = optimizer._inner_opt
    return optimizer


def _has_left_out(optimizer: Any) -> bool:
    """Whether an optimizer that was just called to step found that the gradients were not finite.

    What its scaler has found is handed to it as a tensor, in whose place it puts the answer once it has
    read it. A tensor is no answer: then it has stepped without looking.
    """
    found = getattr(optimizer, "_auxiliary_vars", {}).get("found_inf")
    return isinstance(found, bool | int) and bool(found)


def _leaves_out(scaler: Any, optimizer: Any) -> bool:
    """Whether a scaler that has not called a Paddle optimizer has left it out.

    An optimizer of another kind may have stepped unseen, unless the scaler says that it did not.
    """
    if isinstance(optimizer, paddle.optimizer.Optimizer):
        return "step" not in vars(optimizer)
    names = ("_cache_found_inf", "_cache_founf_inf")  # sic, in Paddle 2.6
    return any(getattr(scaler, name, None) is True for name in names)


def optimizer_classes() -> frozenset[type[Any]]:
    """Every optimizer class there is so far."""
    base = paddle.optimizer.Optimizer
    return frozenset((base, *_subclasses(base)))


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
