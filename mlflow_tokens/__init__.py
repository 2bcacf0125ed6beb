"""What did each cent of this run buy? Tokens, tokens/s and cost of PaddlePaddle training in MLflow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mlflow_tokens.comparison.frame import compare
    from mlflow_tokens.counting import BatchCounts
    from mlflow_tokens.paddle.autolog import autolog
    from mlflow_tokens.paddle.trainer_callback import TrainerCallback
    from mlflow_tokens.pricing.price import Price
    from mlflow_tokens.tracker import Tracker, current

__all__ = ["BatchCounts", "Price", "Tracker", "TrainerCallback", "autolog", "compare", "current"]

_HOME = {
    "BatchCounts": "mlflow_tokens.counting",
    "Price": "mlflow_tokens.pricing.price",
    "Tracker": "mlflow_tokens.tracker",
    "TrainerCallback": "mlflow_tokens.paddle.trainer_callback",
    "autolog": "mlflow_tokens.paddle.autolog",
    "compare": "mlflow_tokens.comparison.frame",
    "current": "mlflow_tokens.tracker",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import mlflow_tokens` alone imports no framework."""
    if name not in _HOME:
        raise AttributeError(f"module 'mlflow_tokens' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
