"""Times what training waits for its data, by the hooks that Paddle's readers call for its own benchmark."""

from __future__ import annotations

import threading
import time
from typing import Any

from paddle.profiler.timer import benchmark

from mlflow_tokens.notices import say_once
from mlflow_tokens.tracker import Tracker

_NAME = "mlflow_tokens"


class ReaderHooks:
    """One of `paddle.profiler.timer.benchmark().hooks`.

    Only waits of the main thread count: a reader that fetches ahead on another holds nobody up. Of a
    reader that has come to its end nobody is told, so a wait counts when it is over.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._began: float | None = None

    def install(self) -> None:
        """Join the hooks; of a Paddle without them there is no waiting time."""
        try:
            benchmark().hooks[_NAME] = self
        except Exception as error:
            say_once("reader", "Waiting for data cannot be told from training: %r", error)

    def remove(self) -> None:
        """Leave them."""
        hooks = getattr(benchmark(), "hooks", {})
        if hooks.get(_NAME) is self:
            del hooks[_NAME]

    def before_reader(self, _benchmark: Any) -> None:
        """A batch is asked for."""
        if threading.current_thread() is threading.main_thread():
            self._began = time.monotonic()

    def after_reader(self, _benchmark: Any) -> None:
        """The batch is there."""
        if threading.current_thread() is not threading.main_thread():
            return
        began, self._began = self._began, None
        if began is not None:
            self._tracker.meter.clock.waited_for_data(time.monotonic() - began)

    def begin(self, _benchmark: Any) -> None:
        """Not ours."""

    after_step = end = begin
