"""Functions that Paddle turns into a static graph: their models' hooks run once, when the graph is made.

`to_static` of a model is seen where the model is called. Where a function around it becomes the graph (by
its syntax, `full_graph=True`), the function itself is looked at: the models it can reach, and the ids among
its arguments. Under SOT (`full_graph=False`) the hooks of the model run at every call.
"""

from __future__ import annotations

import inspect
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paddle
from paddle.jit.dy2static.program_translator import ASTStaticFunction, StaticFunction

from mlflow_tokens.paddle.candidates import outermost
from mlflow_tokens.paddle.model_hooks import ModelHooks
from mlflow_tokens.patches import Patches
from mlflow_tokens.tracker import Tracker

#: Where a layer is called; a function called in one is a part of it.
_LAYER_CODES = tuple(
    inspect.unwrap(function).__code__
    for function in (paddle.nn.Layer.__call__, paddle.nn.Layer._dygraph_call_func)
)
_PACKAGE = Path(__file__).parent.parent
#: Functions that a function calls, which call others …
_DEPTH = 3


class GraphHooks:
    """Sees calls of static functions that train a model."""

    def __init__(self, tracker: Tracker, models: ModelHooks) -> None:
        self._tracker = tracker
        self._models = models
        self._patches = Patches()
        self._reached: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Keep our own code out of graphs and look at calls of static functions."""
        _keep_out_of_graphs()
        self._patches.wrap(StaticFunction, "__call__", self._called)

    def remove(self) -> None:
        """Put everything back."""
        self._patches.revert()
        self._reached.clear()

    def _called(self, original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if (
                isinstance(function, ASTStaticFunction)
                and paddle.in_dynamic_mode()
                and not _is_within_layer()
            ):
                self._look_at(function, args, kwargs)
        except Exception as error:
            self._tracker.counting_failed(error)
        return original(function, *args, **kwargs)

    def _look_at(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        layers = [layer for layer in map(_target, self._layers_of(function)) if layer is not None]
        given = [*_layers_in(args), *_layers_in(kwargs)]
        if given:
            layers = outermost(list({id(layer): layer for layer in (*layers, *given)}.values()))
        if layers:
            self._models.function_called(function, layers, args, kwargs)

    def _layers_of(self, function: Any) -> list[Any]:
        """The layers that a function can reach by itself, weakly: looked up once, as its graph is made."""
        if function not in self._reached:
            found = {id(layer): layer for layer in _reachable(function)}
            self._reached[function] = [weakref.ref(layer) for layer in outermost(list(found.values()))]
        return self._reached[function]


def _keep_out_of_graphs() -> None:
    """Have Paddle leave our code alone while it makes graphs.

    SOT translates every Python function that is called while it runs, hooks included, and its own errors
    there would end the training.
    """
    from mlflow_tokens import patches
    from mlflow_tokens.paddle import layer_hooks, learning, loss_hooks, model_hooks, moe_hooks, step_hooks

    paddle.jit.ignore_module(
        [
            patches,
            sys.modules[__name__],
            layer_hooks,
            learning,
            loss_hooks,
            model_hooks,
            moe_hooks,
            step_hooks,
        ]
    )
    try:
        from paddle.jit.sot.opcode_translator import skip_files

        skip_files.skip_file_names.add(f"{_PACKAGE}/")
        skip_files.setup_skip_files()
    except (ImportError, AttributeError):  # a Paddle whose SOT is built otherwise
        pass


def _target(reference: Any) -> Any:
    return reference()


def _is_within_layer() -> bool:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code in _LAYER_CODES:
            return True
        frame = frame.f_back
    return False


def _reachable(function: Any) -> Iterator[Any]:
    """Layers that a static function's code names, or is a method of."""
    yield from _layers_in(function.class_instance)
    yield from _named_by(function.dygraph_function, _DEPTH)


def _named_by(function: Any, depth: int) -> Iterator[Any]:
    function = inspect.unwrap(getattr(function, "dygraph_function", function))
    code = getattr(function, "__code__", None)
    if code is None:
        return
    codes = [code, *(const for const in code.co_consts if isinstance(const, types.CodeType))]
    names = {name for part in codes for name in part.co_names}
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not bound yet
            continue
    for value in (*values, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield from _layers_in(value)
        if depth and isinstance(value, types.FunctionType | types.MethodType | StaticFunction):
            yield from _named_by(getattr(value, "__func__", value), depth - 1)
            yield from _layers_in(getattr(value, "__self__", None))


def _layers_in(value: Any, depth: int = 1) -> Iterator[Any]:
    """A layer that has something to train, or those in a container or in an object's attributes."""
    if isinstance(value, paddle.nn.Layer):
        if any(not parameter.stop_gradient for parameter in value.parameters()):
            yield value
    elif isinstance(value, types.ModuleType | type | paddle.Tensor):
        return
    elif depth >= 0:
        items = value if isinstance(value, tuple | list) else ()
        if isinstance(value, dict):
            items = tuple(value.values())
        elif not items and not callable(value):
            items = tuple(getattr(value, "__dict__", {}).values())
        for item in items:
            yield from _layers_in(item, depth - 1)
