"""The hooks that lie on other people's layers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import paddle


class Hook:
    """A hook of ours on a layer, of which copies do nothing.

    A deep copy of a model (an average of its weights, a teacher) is not the model that is trained, and a
    model that is pickled must load where mlflow_tokens is not installed: a copy is the exit of the
    standard library's null context, which takes anything and returns None.

    Where a function that calls the model is traced (SOT), our code may be walked through: that takes a
    bound method that is an attribute of another object for one of that object. So there is none.
    """

    def __init__(self, hooks: Any) -> None:
        self._hooks = hooks

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class TrainedHook(Hook):
    """The hook on a trained model."""

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        # While a model is turned into a static graph (`paddle.jit.save`) hooks are called too, without
        # keywords and with symbols instead of tensors.
        if paddle.in_dynamic_mode():
            self._hooks.trained_layer_called(layer, args, kwargs or {})


class WrappedHook(Hook):
    """The hook on what is in a trained wrapper."""

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if paddle.in_dynamic_mode():
            self._hooks.wrapped_layer_called(layer)
