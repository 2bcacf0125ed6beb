"""Sees micro-batches on their way into the model that is trained."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import paddle

from mlflow_tokens.counting import BatchCounts, count_labels, find_fields, is_array, size
from mlflow_tokens.notices import say_once
from mlflow_tokens.paddle.candidates import PENDING_LIMIT, Candidate, holds_no_tokens, leaders, outermost
from mlflow_tokens.paddle.layer_hooks import TrainedHook, WrappedHook
from mlflow_tokens.paddle.learning import Learning, unwrapped
from mlflow_tokens.patches import Patches
from mlflow_tokens.tracker import Tracker

#: Paddle 2.6's hooks are not given what a layer is called with by name: there every call is looked at.
_HOOKS_SEE_KEYWORDS = "with_kwargs" in inspect.signature(paddle.nn.Layer.register_forward_pre_hook).parameters


class ModelHooks:
    """Finds the trained models and counts what they are fed.

    A model is trained if an optimizer that steps holds its parameters. While an optimizer is known that
    has not stepped yet, every outermost layer that is called in training mode with gradients on is a
    candidate, seen through `Layer.__call__`; what it was fed is kept until an optimizer steps. After
    that a forward pre-hook on the model alone is left, which costs other layers nothing. Where the user has
    named the models, these are counted, and no other.
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
        self.learning = Learning()
        self._candidates: dict[int, Candidate] = {}
        self._newest_is_candidate = False
        self._evaluated = False
        self._came_with_labels: frozenset[int] = frozenset()
        self._named = False
        self._fed_ids = False
        self._without_tokens: deque[BatchCounts] = deque(maxlen=PENDING_LIMIT)
        self._idle: weakref.WeakSet[Any] = weakref.WeakSet()
        self._all_found = False
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()
        self._handles: list[Any] = []
        self._names: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()
        self._matched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        self._discovery = Patches()

    def install(self) -> None:
        """Begin to look for models."""
        # Optimizers that were made before us may train models that have not been fed yet.
        # One without parameters (Paddle keeps such a thing in fleet) trains nothing.
        made = [item for item in gc.get_objects() if type(item) in self._optimizer_classes]
        self._waiting.update(item for item in made if _parameters(item))
        self._discover()
        self.learning.install()

    def count_only(self, layers: Sequence[Any]) -> None:
        """The user has named the models whose tokens count."""
        self._named = True
        for layer in outermost([*layers]):
            self.watches(layer)
            self._train(layer)
        self._all_found = True
        if _HOOKS_SEE_KEYWORDS:
            self._discovery.revert()

    def remove(self) -> None:
        """Take every hook out."""
        self._discovery.revert()
        self.learning.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._trained.clear()
        self._candidates.clear()

    def optimizer_made(self, optimizer: Any) -> None:
        """A new optimizer may train a model not seen yet."""
        self._waiting.add(optimizer)
        self._discover()

    def optimizer_stepped(self, optimizer: Any, wrapper: Any = None) -> bool:
        """Whether this optimizer trains a model of ours; what a newly found one was fed is counted now.

        wrapper: what the script has called to step; it knows parameters that the optimizer has only parts of.
        """
        trains = optimizer in self._matched or self._match(optimizer, wrapper or optimizer)
        if trains and self._without_tokens:
            self._trained_without_tokens(optimizer)
        return trains

    def _match(self, optimizer: Any, wrapper: Any) -> bool:
        owned = {id(parameter) for parameter in _parameters(wrapper)}
        self.stepped(owned)
        known = any(owned.intersection(map(id, layer.parameters())) for layer in self._trained)
        if not known:
            found = [] if self._named else leaders([c for c in self._candidates.values() if c.trains(owned)])
            for candidate in found:
                self._adopt(candidate, owned)
            if not found:
                if owned and not self._named:
                    self._never_seen(optimizer)
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
        if self._named:
            return
        self._all_found = False
        if not self._discovery.active:
            self._discovery.wrap(paddle.nn.Layer, "__call__", self._layer_called)

    def _adopt(self, candidate: Candidate, owned: set[int]) -> None:
        candidate.settle({*owned, *(id(p) for other in self._waiting for p in _parameters(other))})
        for counts in candidate.batches:
            self._count_tokens(counts)
        self._without_tokens.extend(candidate.without_tokens)
        self._candidates = {key: other for key, other in self._candidates.items() if other is not candidate}
        self._newest_is_candidate = False
        for layer in candidate.trained_by(owned):
            self._train(layer)

    def _trained_without_tokens(self, optimizer: Any) -> None:
        """A step follows micro-batches in which no token can be.

        Of several models some are fed tokens, and count; others are fed what those make. Where none is fed
        any, tokens are unknown, which is certain when every optimizer has had its turn.
        """
        if not self._fed_ids:
            if optimizer not in self._idle and self.others_train(optimizer):
                self._idle.add(optimizer)
                return
            for counts in self._without_tokens:
                self._tracker.count_tokens(counts)
        self._without_tokens.clear()

    def _train(self, layer: Any) -> None:
        if layer in self._trained:
            return
        self._trained.add(layer)
        if _HOOKS_SEE_KEYWORDS:
            self._handles.append(layer.register_forward_pre_hook(TrainedHook(self), with_kwargs=True))
        if isinstance(layer, paddle.DataParallel):
            # Evaluation often calls the wrapped model itself.
            self._handles.append(layer._layers.register_forward_pre_hook(WrappedHook(self)))

    def _never_seen(self, optimizer: Any) -> None:
        say_once(
            "unseen",
            "The model that %s trains was not seen when it was called, so its tokens are not counted: call "
            "the model itself (model(...)), turn the model rather than a function around it into a static "
            "graph, or count by hand with mlflow_tokens.Tracker.",
            type(optimizer).__name__,
        )

    # ---- what Paddle calls ------------------------------------------------------------------------

    def _layer_called(self, original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        depth = getattr(self._depth, "value", 0)
        if depth == 0 or self._named:
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
        if not paddle.in_dynamic_mode() or self.learning.in_backward:
            return
        if layer in self._trained:
            if not _HOOKS_SEE_KEYWORDS:
                self.trained_layer_called(layer, args, kwargs)
            return
        if not self._all_found and not self._named:
            self._candidate_called(layer, [layer], args, kwargs)

    def _candidate_called(
        self, called: Any, layers: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        candidate = self._candidates.get(id(called))
        known = candidate is not None and candidate.called() is called
        if not any(map(self.learning.is_training, layers)):
            if known:
                self._evaluates()
            return
        if candidate is None or not known:
            # A loss is a layer too, but there is nothing in it to train.
            if not any(not parameter.stop_gradient for layer in layers for parameter in layer.parameters()):
                return
            candidate = Candidate(called, layers)
            for layer in layers:
                self.watches(layer)
        # The one called last is the last in the mapping.
        self._candidates.pop(id(called), None)
        self._candidates[id(called)] = candidate
        self.before_batch()
        self._tracker.trains()
        counts, without_tokens = self._count(called, args, kwargs)
        if without_tokens:
            candidate.without_tokens.append(counts)
        else:
            self._newest_is_candidate = True
            candidate.add(counts)

    def feed(self, layer: Any, counts: BatchCounts) -> None:
        """A loop that calls the parts of a model by itself trains it on this."""
        if self._named and not self._is_trained(layer):
            return
        self._trained.add(layer)
        self.before_batch()
        self._count_tokens(counts)

    def function_called(
        self, function: Any, layers: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A function that is a static graph is called, in which these models may be called unseen."""
        if self.learning.in_backward:
            return
        trained = [layer for layer in layers if self._is_trained(layer)]
        if trained:
            self._trained_called(function, trained, args, kwargs)
        elif not self._all_found and not self._named:
            self._candidate_called(function, layers, args, kwargs)

    def _is_trained(self, layer: Any) -> bool:
        if layer in self._trained:
            return True
        # A part of a trained model, or something around one.
        parts = set(layer.sublayers())
        return any(other in parts or layer in other.sublayers() for other in self._trained)

    def trained_layer_called(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A trained model is about to be called."""
        try:
            self._trained_called(layer, [layer], args, kwargs)
        except Exception as error:
            self._tracker.counting_failed(error)

    def _trained_called(
        self, called: Any, layers: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not any(map(self.learning.is_training, layers)):
            self._evaluates()
        elif not self.learning.in_backward:
            self.before_batch()
            counts, without_tokens = self._count(called, args, kwargs)
            if without_tokens:
                self._tracker.trains()
                self._without_tokens.append(counts)
            else:
                self._newest_is_candidate = False
                self._count_tokens(counts)

    def wrapped_layer_called(self, layer: Any) -> None:
        """What is in a wrapper around a trained model is about to be called."""
        try:
            if not self.learning.is_training(layer):
                self._evaluates()
        except Exception as error:
            self._tracker.counting_failed(error)

    def _evaluates(self) -> None:
        self.before_batch()
        # A loss with gradients is then that of evaluation, as far as can be seen.
        self._evaluated = self.learning.with_gradients
        self._tracker.evaluates()

    def _count_tokens(self, counts: BatchCounts) -> None:
        self._fed_ids = self._fed_ids or counts.computed is not None
        self._tracker.count_tokens(counts)

    def _count(self, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[BatchCounts, bool]:
        """Tokens of a micro-batch to learn from, and whether there can be none in it."""
        self._evaluated = False
        if len(args) == 1 and not kwargs and not is_array(args[0]):
            arguments = args[0]
        else:
            names = self._names_of(called)
            arguments = dict(zip(names, args, strict=False))
            arguments.update((f"{index}", args[index]) for index in range(len(names), len(args)))
            arguments.update(kwargs)
        # Comparisons and their sums keep nothing for gradients, so that no_grad would only cost.
        counts = self._tracker.of_source(self._tracker.count_fields(find_fields(arguments)))
        if counts.computed is None:
            name = getattr(called, "__name__", type(called).__name__)
            why = f"{counts.reason} that {name} was called with"
            unknown = counts._replace(
                reason=f"{why}; name it input_ids, or count by hand with mlflow_tokens.Tracker"
            )
            return unknown, holds_no_tokens(arguments)
        self._came_with_labels = frozenset() if counts.trained is None else counts.label_sizes
        refine, self.refine = self.refine, None
        return counts if refine is None else refine(counts), False

    def _names_of(self, called: Any) -> tuple[str, ...]:
        """Names of the positional parameters; of the wrapped model where a wrapper hides it."""
        if called not in self._names:
            kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            if isinstance(called, paddle.nn.Layer):
                # The class's function: to_static puts an object without a signature into the instance.
                _self, *parameters = inspect.signature(type(unwrapped(called)).forward).parameters.values()
            else:
                # Of a layer's method it is the bound one.
                parameters = [*inspect.signature(called.dygraph_function).parameters.values()]
            self._names[called] = tuple(parameter.name for parameter in parameters if parameter.kind in kinds)
        return self._names[called]

    def labels_seen(self, labels: Any, ignore_index: int | None) -> None:
        """A loss takes labels: count those of the newest micro-batch, unless they came with it or before.

        ignore_index: None where the loss leaves no label out.
        """
        if self._evaluated:
            return
        if size(labels) in self._came_with_labels:
            self._came_with_labels = frozenset()
            if ignore_index not in (None, self._tracker.options.pad_policy.ignore_index):
                self._ignores_another(ignore_index)
            return
        if self._tracker.meter.awaits_labels(size(labels)):
            self._tracker.count_labels(_trained(labels, ignore_index))
        elif self._newest_is_candidate:
            fitting = [other for other in reversed(self._candidates.values()) if other.fits(size(labels))]
            if fitting and fitting[0].batches[-1].trained is None:
                trained = _trained(labels, ignore_index)
                fitting[0].learn(trained)
                for other in fitting[1:]:
                    other.may_learn(trained, fitting[0])

    def _ignores_another(self, ignore_index: int | None) -> None:
        """The loss leaves out another label than those that were counted as they came with the batch."""
        if self._tracker.options.pad_policy.ignore_index != -100:
            return  # as the user has stated it, whatever the model makes of it
        say_once(
            "ignore_index",
            "Trained tokens are unknown: the loss in the model has ignore_index=%s; state "
            "ignore_index=%s if labels are given to the model so.",
            ignore_index,
            ignore_index,
        )
        if self._newest_is_candidate:
            next(reversed(self._candidates.values())).learn(None)
        else:
            self._tracker.meter.count(BatchCounts(0, 0, None))


def _trained(labels: Any, ignore_index: int | None) -> Any:
    with paddle.no_grad():
        counted = count_labels(labels, -100 if ignore_index is None else ignore_index, (size(labels),))
    return counted if counted is None or ignore_index is not None else size(labels)


def _parameters(optimizer: Any) -> list[Any]:
    """The parameters of an optimizer, whose list may hold groups of them."""
    # With sharding an optimizer updates some of them, or slices.
    items = (
        getattr(optimizer, "_origin_parameter_list", None)
        or getattr(optimizer, "_parameter_list", None)
        or []
    )
    groups = [item["params"] if isinstance(item, dict) else [item] for item in items]
    return [parameter for group in groups for parameter in group]
