"""Keeps MLflow, when it works for us, from drawing on the script's random numbers.

MLflow names runs and spreads its retries with Python's global generator. A script that shuffles its data
with `random` would see another order with us than without. So in MLflow's modules `random` becomes an
object that is the generator of old on every thread but ours.
"""

from __future__ import annotations

import importlib
import random
from typing import Any

from mlflow_tokens.sinks.base import is_our_thread

#: MLflow's modules that draw random numbers on the way from `start_run` and `log_batch` to a server …
_MODULES = (
    "mlflow.utils.name_utils",
    "mlflow.utils.rest_utils",
    "mlflow.utils.request_utils",
    "urllib3.util.retry",
)
#: … and to a database; loading this one takes a second, which a run on a server need not spend.
_DATABASE_MODULE = "mlflow.store.tracking.sqlalchemy_store"

_ours = random.Random()


def is_served(tracking_uri: str) -> bool:
    """Whether a server stands between us and the store."""
    return tracking_uri.startswith(("http://", "https://"))


class _ThreadsOwnRandom:
    """The module `random` for the script's threads, a generator of our own for ours."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_ours if is_our_thread() else random, name)


def leave_the_scripts_random_numbers_alone(tracking_uri: str) -> None:
    """From now on MLflow draws from a generator of our own on our threads; no other thread sees a change."""
    for name in _MODULES if is_served(tracking_uri) else (*_MODULES, _DATABASE_MODULE):
        try:
            module = importlib.import_module(name)
        except ImportError:
            # A store whose library is not installed (SQLAlchemy) draws nothing.
            continue
        if vars(module).get("random") is random:
            vars(module)["random"] = _ThreadsOwnRandom()
