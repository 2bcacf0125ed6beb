"""A thread like the one that writes to a sink."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mlflow_tokens.sinks.base import mark_our_thread


def on_writer(work: Callable[[], None]) -> None:
    """Do it on a thread like the writer's, and raise here what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        mark_our_thread()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
