"""Sees micro-batches on their way into the model that is trained, and labels on their way into the loss."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle.distributed.fleet.meta_parallel import ParallelCrossEntropy

from mlflow_tokens.counting import BatchCounts, count_labels, find_fields, is_array, size
from mlflow_tokens.patches import Patches
from mlflow_tokens.tracker import Tracker

#: Micro-batches that a model may be fed before an optimizer steps; more were never meant to be trained.
_PENDING_LIMIT = 4096
#: Paddle 2.6's hooks are not given what a layer is called with by name: there every call is looked at.
_HOOKS_SEE_KEYWORDS = "with_kwargs" in inspect.signature(paddle.nn.Layer.register_forward_pre_hook).parameters


class _Hook:
    """A hook of ours on a layer, of which copies do nothing.

    A deep copy of a model (an average of its weights, a teacher) is not the model that is trained, and a
    model that is pickled must load where mlflow_tokens is not installed: a copy is the exit of the
    standard library's null context, which takes anything and returns None.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        # While a model is turned into a static graph (`paddle.jit.save`) hooks are called too, without
        # keywords and with symbols instead of tensors.
        if paddle.in_dynamic_mode():
            self._call(layer, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class ModelHooks:
    """Finds the trained models and counts what they are fed.

    A model is trained if an optimizer that steps holds its parameters. While an optimizer is known that
    has not stepped yet, every outermost layer that is called in training mode with gradients on is a
    candidate, seen through `Layer.__call__`; what it was fed is kept until an optimizer steps. After
    that a forward pre-hook on the model alone is left, which costs other layers nothing.
    """

    def __init__(self, tracker: Tracker, optimizer_classes: frozenset[type[Any]]) -> None:
        self._tracker = tracker
        self._optimizer_classes = optimizer_classes
        self.watches: Callable[[Any], None] = lambda layer: None
        """Called when a layer may be a trained model, before its first forward."""
        self.stepped: Callable[[set[int]], None] = lambda parameters: None
        """Called with the ids of its parameters when an optimizer not known yet has stepped."""
        self.before_batch: Callable[[], None] = lambda: None
        """Called before a micro-batch of a trained model is counted, or one that evaluates it."""
        self.refine: Callable[[BatchCounts], BatchCounts] | None = None
        """What a loop knows of the next micro-batch that the model is not told."""
        self._depth = threading.local()
        self._candidates: dict[int, _Candidate] = {}
        self._newest_is_candidate = False
        self._all_found = False
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()
        self._handles: list[Any] = []
        self._names: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()
        self._matched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        self._discovery = Patches()
        self._losses = Patches()

    def install(self) -> None:
        """Begin to look for models and at losses."""
        # Optimizers that were made before us may train models that have not been fed yet.
        # One without parameters (Paddle keeps such a thing in fleet) trains nothing.
        made = [item for item in gc.get_objects() if type(item) in self._optimizer_classes]
        self._waiting.update(item for item in made if _parameters(item))
        self._discover()
        for name in ("cross_entropy", "softmax_with_cross_entropy"):
            if name in vars(F):
                self._losses.wrap(F, name, self._loss_called)
        self._losses.wrap(ParallelCrossEntropy, "forward", self._parallel_loss_called)
        for owner, name in ((paddle.Tensor, "backward"), (paddle.autograd, "backward"), (paddle, "grad")):
            self._losses.wrap(owner, name, self._backward_called)

    def remove(self) -> None:
        """Take every hook out."""
        self._discovery.revert()
        self._losses.revert()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._trained.clear()
        self._candidates.clear()

    def optimizer_made(self, optimizer: Any) -> None:
        """A new optimizer may train a model not seen yet."""
        self._waiting.add(optimizer)
        self._discover()

    def optimizer_stepped(self, optimizer: Any) -> bool:
        """Whether this optimizer trains a model of ours; what a newly found one was fed is counted now."""
        if optimizer in self._matched:
            return True
        owned = {id(parameter) for parameter in _parameters(optimizer)}
        self.stepped(owned)
        known = any(owned.intersection(map(id, layer.parameters())) for layer in self._trained)
        if not known:
            found = _leaders(
                [candidate for candidate in self._candidates.values() if candidate.trains(owned)]
            )
            for candidate in found:
                self._adopt(candidate)
            if not found:
                return False
        self._matched.add(optimizer)
        self._waiting.discard(optimizer)
        if not self._waiting:
            self._all_found = True
            if _HOOKS_SEE_KEYWORDS:
                self._discovery.revert()
            self._candidates.clear()
        return True

    def others_train(self, optimizer: Any) -> bool:
        """Whether there are more optimizers that train models, or may."""
        return any(other is not optimizer for other in (*self._matched, *self._waiting))

    def _discover(self) -> None:
        self._all_found = False
        if not self._discovery.active:
            self._discovery.wrap(paddle.nn.Layer, "__call__", self._layer_called)

    def _adopt(self, candidate: _Candidate) -> None:
        layer = candidate.layer()
        for counts in candidate.batches:
            self._tracker.count_tokens(counts)
        self._candidates.pop(id(layer), None)
        self._newest_is_candidate = False
        if layer is None:
            return
        self._trained.add(layer)
        if _HOOKS_SEE_KEYWORDS:
            self._handles.append(
                layer.register_forward_pre_hook(_Hook(self._trained_layer_called), with_kwargs=True)
            )
        if isinstance(layer, paddle.DataParallel):
            # Evaluation often calls the wrapped model itself.
            self._handles.append(layer._layers.register_forward_pre_hook(_Hook(self._wrapped_layer_called)))

    # ---- what Paddle calls ------------------------------------------------------------------------

    def _layer_called(self, original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        depth = getattr(self._depth, "value", 0)
        if depth == 0:
            try:
                self._outermost_layer_called(layer, args, kwargs)
            except Exception as error:
                self._tracker.counting_failed(error)
        self._depth.value = depth + 1
        try:
            return original(layer, *args, **kwargs)
        finally:
            self._depth.value = depth

    def _outermost_layer_called(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not paddle.in_dynamic_mode() or self._in_backward():
            return
        if layer in self._trained:
            if not _HOOKS_SEE_KEYWORDS:
                self._trained_layer_called(layer, args, kwargs)
            return
        if self._all_found:
            return
        candidate = self._candidates.get(id(layer))
        known = candidate is not None and candidate.layer() is layer
        if not _is_training(layer):
            if known:
                self.before_batch()
                self._tracker.evaluates()
            return
        if candidate is None or not known:
            # A loss is a layer too, but there is nothing in it to train.
            if not any(not parameter.stop_gradient for parameter in layer.parameters()):
                return
            candidate = _Candidate(layer)
            self.watches(layer)
        # The one called last is the last in the mapping.
        self._candidates.pop(id(layer), None)
        self._candidates[id(layer)] = candidate
        self._newest_is_candidate = True
        self.before_batch()
        self._tracker.trains()
        candidate.add(self._count(layer, args, kwargs))

    def _trained_layer_called(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            if not _is_training(layer):
                self.before_batch()
                self._tracker.evaluates()
            elif not self._in_backward():
                self.before_batch()
                self._newest_is_candidate = False
                self._tracker.count_tokens(self._count(layer, args, kwargs))
        except Exception as error:
            self._tracker.counting_failed(error)

    def _wrapped_layer_called(self, layer: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        try:
            if not _is_training(layer):
                self.before_batch()
                self._tracker.evaluates()
        except Exception as error:
            self._tracker.counting_failed(error)

    def _count(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchCounts:
        if len(args) == 1 and not kwargs and not is_array(args[0]):
            fields = find_fields(args[0])
        else:
            names = self._names_of(layer)
            named = {
                names[index] if index < len(names) else f"{index}": value for index, value in enumerate(args)
            }
            fields = find_fields({**named, **kwargs})
        with paddle.no_grad():
            counts = self._tracker.of_source(self._tracker.count_fields(fields))
        if counts.computed is None:
            called = f"{counts.reason} that {type(layer).__name__} was called with"
            return replace(
                counts, reason=f"{called}; name it input_ids, or count by hand with mlflow_tokens.Tracker"
            )
        refine, self.refine = self.refine, None
        return counts if refine is None else refine(counts)

    def _names_of(self, layer: Any) -> tuple[str, ...]:
        """Names of the positional parameters of `forward`; of the wrapped model where a wrapper hides it."""
        if layer not in self._names:
            kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            # The class's function: to_static puts an object without a signature into the instance.
            _self, *parameters = inspect.signature(type(_unwrapped(layer)).forward).parameters.values()
            self._names[layer] = tuple(parameter.name for parameter in parameters if parameter.kind in kinds)
        return self._names[layer]

    def _in_backward(self) -> bool:
        return getattr(self._depth, "backward", False)

    def _backward_called(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """A forward within backward is a recomputation: its tokens were counted when they came first."""
        before = self._in_backward()
        self._depth.backward = True
        try:
            return original(*args, **kwargs)
        finally:
            self._depth.backward = before

    def _loss_called(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if paddle.is_grad_enabled() and paddle.in_dynamic_mode() and not self._in_backward():
                self._look_at_labels(args, kwargs)
        except Exception as error:
            self._tracker.counting_failed(error)
        return original(*args, **kwargs)

    def _parallel_loss_called(self, original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss of a vocabulary that is split over ranks; each of them is given all labels."""
        seen = {"ignore_index": getattr(layer, "ignore_index", -100), **kwargs}
        return self._loss_called(lambda *_args, **_seen: original(layer, *args, **kwargs), *args, **seen)

    def _look_at_labels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the labels of the newest micro-batch, unless they came with it or were counted before."""
        labels = kwargs.get("label", args[1] if len(args) > 1 else None)
        if not is_array(labels):
            return
        ignore_index = kwargs.get("ignore_index", args[3] if len(args) > 3 else -100)
        if self._newest_is_candidate:
            for candidate in reversed(self._candidates.values()):
                newest = candidate.batches[-1]
                if size(labels) in newest.label_sizes:
                    if newest.trained is None:
                        candidate.batches[-1] = replace(newest, trained=_trained(labels, ignore_index))
                    return
        if self._tracker.meter.awaits_labels(size(labels)):
            self._tracker.count_labels(_trained(labels, ignore_index))


class _Candidate:
    """A layer that may be a trained model, and what it was fed so far."""

    def __init__(self, layer: Any) -> None:
        self.layer = weakref.ref(layer)
        self.batches: list[BatchCounts] = []

    def add(self, counts: BatchCounts) -> None:
        if len(self.batches) == _PENDING_LIMIT:
            reason = f"{_PENDING_LIMIT} micro-batches went by without an optimizer step"
            self.batches = [BatchCounts(None, None, None, reason=reason)]
        self.batches.append(counts)

    @property
    def has_ids(self) -> bool:
        return any(counts.computed is not None for counts in self.batches)

    def trains(self, parameters: set[int]) -> bool:
        layer = self.layer()
        return layer is not None and not parameters.isdisjoint(map(id, layer.parameters()))


def _leaders(found: list[_Candidate]) -> list[_Candidate]:
    """Those whose batches are the training data.

    Of a model called in several parts these are the parts that are fed ids; the others are fed what
    those made. A part that is called once more on its own is counted with the model it is part of.
    """
    found = [candidate for candidate in found if candidate.has_ids] or found
    layers = [candidate.layer() for candidate in found]
    parts = {id(part) for layer in layers if layer is not None for part in layer.sublayers()}
    return [candidate for candidate, layer in zip(found, layers, strict=True) if id(layer) not in parts]


def _unwrapped(layer: Any) -> Any:
    """The model itself, where a wrapper for data parallelism is around it."""
    while isinstance(layer, paddle.DataParallel):
        layer = layer._layers
    return layer


def _is_training(layer: Any) -> bool:
    """Whether a call of this layer now is one to learn from.

    A script that calls `eval()` on the model it has wrapped leaves the wrapper in training mode.
    """
    return bool(_unwrapped(layer).training) and paddle.is_grad_enabled()


def _trained(labels: Any, ignore_index: int) -> Any:
    with paddle.no_grad():
        return count_labels(labels, ignore_index, (size(labels),))


def _parameters(optimizer: Any) -> list[Any]:
    """The parameters of an optimizer, whose list may hold groups of them."""
    items = getattr(optimizer, "_parameter_list", None) or []
    groups = [item["params"] if isinstance(item, dict) else [item] for item in items]
    return [parameter for group in groups for parameter in group]
