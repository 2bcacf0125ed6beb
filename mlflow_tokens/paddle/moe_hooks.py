"""Sees the gates that the trained model's tokens pass on their way to experts: tokens x experts chosen.

From shapes and attributes alone, in plain ints: nothing on the device is computed or read. What a gate
chooses counts, also where a token is dropped at its expert's capacity afterwards. A rank counts what its
own gates are given; of ranks that share a sequence each may be given all of it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import paddle
from paddle.jit.dy2static.program_translator import StaticFunction

from mlflow_tokens.notices import say_once
from mlflow_tokens.paddle.layer_hooks import Hook
from mlflow_tokens.paddle.model_hooks import ModelHooks
from mlflow_tokens.tracker import Tracker

_CHOSEN = ("top_k", "num_experts_per_tok")
_EXPERTS = ("num_experts", "n_routed_experts", "tot_expert")


class MoeHooks:
    """Watches models that may be trained, and delivers what the gates of those choose that are.

    A model is watched from its first call on, since what it was fed before an optimizer first steps counts
    as well. Until then the choices of its gates are kept; a teacher's are never delivered.
    """

    def __init__(self, tracker: Tracker, models: ModelHooks) -> None:
        self._tracker = tracker
        self._learning = models.learning
        models.watches, models.stepped = self.watch, self.optimizer_stepped
        self._models: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()
        self._parts: weakref.WeakSet[Any] = weakref.WeakSet()
        self._handles: list[Any] = []
        self._now = threading.local()

    def remove(self) -> None:
        """Take every hook out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._models.clear()
        self._parts.clear()

    def watch(self, model: Any) -> None:
        """An outermost layer that may be a trained model is about to be called."""
        try:
            if model not in self._models:
                self._watch(model)
        except Exception as error:
            self._failed(error)

    def optimizer_stepped(self, parameters: set[int]) -> None:
        """An optimizer of these parameters (by id) has stepped: the models that have some are trained."""
        try:
            for model, watched in list(self._models.items()):
                if not watched.trained and not parameters.isdisjoint(map(id, model.parameters())):
                    watched.trained = True
            self._deliver()
        except Exception as error:
            self._failed(error)

    def _watch(self, model: Any) -> None:
        watched = self._models[model] = _Watched()
        gates, hidden = _gates_of(model)
        if gates and any(
            isinstance(layer.forward, StaticFunction) for layer in model.sublayers(include_self=True)
        ):
            # Hooks would become part of the graph, or break it.
            self.gate_compiled(watched)
            return
        if hidden is not None:
            watched.routed = None
            say_once(
                "gates", "Routed tokens are unknown: no gate is seen that chooses experts in %s.", hidden
            )
        fresh = [(gate, chosen) for gate, chosen in gates if gate not in self._parts]
        if not gates:
            return
        self._handles.append(model.register_forward_pre_hook(_ModelHook(self)))
        self._handles.append(model.register_forward_post_hook(_AfterHook(self)))
        self._parts.update(model.sublayers())
        for gate, chosen in fresh:
            self._handles.append(gate.register_forward_pre_hook(_GateHook(self, watched, chosen)))

    # ---- what Paddle calls ------------------------------------------------------------------------

    def model_called(self, layer: Any) -> None:
        try:
            # A part of a watched model is called in it without gradients where it will be recomputed.
            if layer not in self._parts and not self._learning.in_backward:
                self._now.learning = self._learning.is_training(layer)
        except Exception as error:
            self._failed(error)

    def model_left(self) -> None:
        """A forward of a watched model is over: what its gates have chosen is delivered."""
        try:
            self._deliver()
        except Exception as error:
            self._failed(error)

    def gate_called(self, watched: _Watched, inputs: tuple[Any, ...], chosen: Callable[[], Any]) -> None:
        """Tokens are about to pass a gate that chooses so many experts for each of them."""
        try:
            if not getattr(self._now, "learning", False) or self._learning.in_backward:
                return
            experts = chosen()
            if not inputs or not isinstance(experts, int):
                raise TypeError("a gate was called in a way that does not show its tokens")
            *tokens, _width = inputs[0].shape
            watched.add(math.prod(tokens) * experts)
        except Exception as error:
            self._failed(error)

    def gate_compiled(self, watched: _Watched) -> None:
        """A gate becomes part of a static graph, in which its tokens are not seen."""
        say_once("gates", "Routed tokens are unknown: the gates are in a static graph.")
        watched.add(None)

    def _deliver(self) -> None:
        for watched in list(self._models.values()):
            if watched.trained and watched.routed != 0:
                routed, watched.routed = watched.routed, 0
                self._tracker.count_routed(routed)

    def _failed(self, error: Exception) -> None:
        say_once("gates", "Routed tokens are unknown from here on: %r", error)
        self._tracker.count_routed(None)


class _Watched:
    """A model with gates. routed: what they have chosen that is not delivered yet; None: unknown."""

    def __init__(self) -> None:
        self.trained = False
        self.routed: int | None = 0

    def add(self, routed: int | None) -> None:
        self.routed = None if self.routed is None or routed is None else self.routed + routed


class _ModelHook(Hook):
    """The hook on a watched model; a copy of it does nothing."""

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if paddle.in_dynamic_mode():
            self._hooks.model_called(layer)


class _AfterHook(_ModelHook):
    """The hook on what a watched model gives."""

    def __call__(self, layer: Any, inputs: tuple[Any, ...], outputs: Any = None) -> None:
        if paddle.in_dynamic_mode():
            self._hooks.model_left()


class _GateHook(Hook):
    """The hook on a gate; a copy of it does nothing."""

    def __init__(self, hooks: MoeHooks, watched: _Watched, chosen: Callable[[], Any]) -> None:
        self._hooks, self._watched, self._chosen = hooks, watched, chosen

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if paddle.in_dynamic_mode():
            self._hooks.gate_called(self._watched, args, self._chosen)
        elif layer.training:
            self._hooks.gate_compiled(self._watched)


def _gates_of(model: Any) -> tuple[list[tuple[Any, Callable[[], Any]]], str | None]:
    """The gates in a model, each with what tells how many experts it chooses for a token.

    A gate is a layer of its own that says so in its class's name and its attributes (those of
    `paddle.incubate.distributed.models.moe` and of PaddleNLP and PaddleFormers), or the linear layer named
    gate or router of a block that has experts (Mixtral).

    Returns:
        The gates; and the name of a class that has experts and no gate that can be seen, if there is one.
    """
    layers = model.sublayers(include_self=True)
    gates = {id(layer): (layer, chosen) for layer in layers if (chosen := _chosen_by(layer)) is not None}
    hidden = None
    for block in layers:
        if not _has_experts(block):
            continue
        if any(id(part) in gates for part in block.sublayers()):
            continue
        gate = getattr(block, "gate", None) or getattr(block, "router", None)
        experts, name = _number(block, _EXPERTS), _name(block, _CHOSEN)
        weight = getattr(gate, "weight", None)
        if isinstance(gate, paddle.nn.Layer) and name and weight is not None and experts in weight.shape:
            gates[id(gate)] = gate, _reader(block, name)
        else:
            hidden = type(block).__name__
    return list(gates.values()), hidden


def _chosen_by(layer: Any) -> Callable[[], Any] | None:
    """What tells how many experts a layer chooses for a token, if it is a gate."""
    kind = type(layer).__name__.lower()
    if ("gate" not in kind and "router" not in kind) or _number(layer, _EXPERTS) is None:
        return None
    if _has_experts(layer):  # the block, not its gate
        return None
    if name := _name(layer, _CHOSEN):
        return _reader(layer, name)
    config = getattr(layer, "config", None)
    if _name(config, ("moe_k",)) and not getattr(config, "moe_use_hard_gate", False):
        return _reader(config, "moe_k")
    return None


def _has_experts(layer: Any) -> bool:
    return isinstance(getattr(layer, "experts", None), paddle.nn.Layer)


def _reader(owner: Any, name: str) -> Callable[[], Any]:
    """Reads an attribute of an owner that it does not keep alive."""
    reference = weakref.ref(owner)
    return lambda: getattr(reference(), name, None)


def _name(owner: Any, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if _number(owner, (name,)) is not None), None)


def _number(owner: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(owner, name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)
