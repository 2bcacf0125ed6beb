"""Whether what is called now is called to learn from it: not in evaluation, and not once more in backward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import paddle
from paddle.distributed.fleet.recompute.recompute import RecomputeFunction
from paddle.distributed.fleet.recompute.recompute_hybrid import _HPRecomputeFunction

from mlflow_tokens.patches import Patches

_RECOMPUTES = (RecomputeFunction, _HPRecomputeFunction)


class Learning:
    """What gradients are to this thread at the moment."""

    def __init__(self) -> None:
        self._now = threading.local()
        self._patches = Patches()
        self._applied: list[Any] = []

    def install(self) -> None:
        """Begin to look at backward and at recomputation."""
        for owner, name in ((paddle.Tensor, "backward"), (paddle.autograd, "backward"), (paddle, "grad")):
            self._patches.wrap(owner, name, self._backward_called)
        for cls in _RECOMPUTES:
            # Inherited from C++, so that it is not in the class to be replaced.
            if "apply" not in vars(cls):
                cls.apply = staticmethod(self._recomputing(cls.apply))
                self._applied.append(cls)

    def remove(self) -> None:
        """Put everything back."""
        self._patches.revert()
        for cls in self._applied:
            del cls.apply
        self._applied.clear()

    @property
    def in_backward(self) -> bool:
        """A forward within backward is a recomputation: its tokens were counted when they came first."""
        return getattr(self._now, "backward", False)

    @property
    def with_gradients(self) -> bool:
        """Whether gradients are kept, or will be when this forward is computed once more."""
        return paddle.is_grad_enabled() or getattr(self._now, "recomputed", False)

    def is_training(self, layer: Any) -> bool:
        """Whether a call of this layer now is one to learn from.

        A script that calls `eval()` on the model it has wrapped leaves the wrapper in training mode.
        """
        return bool(unwrapped(layer).training) and self.with_gradients

    def _backward_called(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.in_backward
        self._now.backward = True
        try:
            return original(*args, **kwargs)
        finally:
            self._now.backward = before

    def _recomputing(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def applied(*args: Any, **kwargs: Any) -> Any:
            """A reentrant recompute calls its function without gradients, as validation would."""
            before = getattr(self._now, "recomputed", False)
            self._now.recomputed = self.with_gradients
            try:
                return apply(*args, **kwargs)
            finally:
                self._now.recomputed = before

        return applied


def unwrapped(layer: Any) -> Any:
    """The model itself, where a wrapper for data parallelism is around it."""
    while isinstance(layer, paddle.DataParallel):
        layer = layer._layers
    return layer
