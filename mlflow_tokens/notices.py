"""What the user is told while training: one line each, once, on global rank 0."""

from __future__ import annotations

import logging
import sys
import threading

logger = logging.getLogger("mlflow_tokens")

_said: set[str] = set()
_lock = threading.Lock()


class _StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is at that moment: scripts and notebooks replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def set_up(silent: bool) -> None:
    """Show our notices on stderr, or none of them."""
    if not logger.handlers:
        handler = _StderrHandler()
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y/%m/%d %H:%M:%S")
        )
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(logging.CRITICAL + 1 if silent else logging.INFO)
    with _lock:
        _said.clear()


def say_once(topic: str, message: str, *values: object, level: int = logging.WARNING) -> None:
    """Say `message` unless something was said about `topic` already: a first failure, not a flood."""
    with _lock:
        if topic in _said:
            return
        _said.add(topic)
    logger.log(level, message, *values)
