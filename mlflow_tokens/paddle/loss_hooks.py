"""Sees labels on their way into the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle.distributed.fleet.meta_parallel import ParallelCrossEntropy

from mlflow_tokens.counting import is_array, local
from mlflow_tokens.paddle.model_hooks import ModelHooks
from mlflow_tokens.patches import Patches
from mlflow_tokens.tracker import Tracker


@dataclass(frozen=True, slots=True)
class _Signature:
    """Where a loss takes its labels and which of them it ignores; None: it ignores none."""

    ignore_at: int | None = 3
    default: int | None = -100

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, int | None]:
        """The labels, and the one that is ignored."""
        labels = next((kwargs[name] for name in ("label", "target") if name in kwargs), None)
        if labels is None and len(args) > 1:
            labels = args[1]
        if self.ignore_at is None:
            return labels, None
        given = args[self.ignore_at] if len(args) > self.ignore_at else self.default
        return labels, kwargs.get("ignore_index", given)


_LOSSES = {
    "cross_entropy": _Signature(),
    "softmax_with_cross_entropy": _Signature(),
    "nll_loss": _Signature(),
    "margin_cross_entropy": _Signature(ignore_at=None),
    "hsigmoid_loss": _Signature(ignore_at=None),
    "adaptive_log_softmax_with_loss": _Signature(ignore_at=None),
}


class LossHooks:
    """Hands labels to `ModelHooks`, as the losses of Paddle are given them."""

    def __init__(self, tracker: Tracker, models: ModelHooks) -> None:
        self._tracker = tracker
        self._models = models
        self._patches = Patches()

    def install(self) -> None:
        """Begin to look at losses. Those that the script has imported by name before are not seen."""
        for name, signature in _LOSSES.items():
            if name in vars(F):
                self._patches.wrap(F, name, _Watch(self, signature))
        self._patches.wrap(ParallelCrossEntropy, "forward", self._parallel_loss_called)

    def remove(self) -> None:
        """Put everything back."""
        self._patches.revert()

    def called(self, signature: _Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A loss is about to be called."""
        try:
            learning = self._models.learning
            if learning.with_gradients and paddle.in_dynamic_mode() and not learning.in_backward:
                labels, ignore_index = signature.read(args, kwargs)
                if is_array(labels):
                    self._models.labels_seen(local(labels), ignore_index)
        except Exception as error:
            self._tracker.counting_failed(error)

    def _parallel_loss_called(self, original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss of a vocabulary that is split over ranks; each of them is given all labels."""
        seen = {"ignore_index": getattr(layer, "ignore_index", -100), **kwargs}
        self.called(_LOSSES["cross_entropy"], args, seen)
        return original(layer, *args, **kwargs)


class _Watch:
    """Calls a loss, and shows before what it is called with."""

    def __init__(self, hooks: LossHooks, signature: _Signature) -> None:
        self._hooks, self._signature = hooks, signature

    def __call__(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._hooks.called(self._signature, args, kwargs)
        return original(*args, **kwargs)
