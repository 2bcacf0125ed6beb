"""Asks what MLflow has of a run's past until it answers, where it did not when the run began."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet

from mlflow_tokens.records import Record
from mlflow_tokens.resume import History

#: Seconds between a question that failed and the next.
RETRY = 10.0
#: The same, while the end of the run waits.
RETRY_AT_END = 0.25

#: Has a question about the history of the run answered in the background.
Ask = Callable[[Callable[[History], list[Record]]], Future[list[Record]]]


class LatePast:
    """One question at a time, so that nobody waits for it."""

    def __init__(
        self, ask: Ask, question: Callable[[History], list[Record]], now: Callable[[], float]
    ) -> None:
        self._now = now
        self._ask: Callable[[], Future[list[Record]]] = lambda: ask(question)
        self._asked: Future[list[Record]] | None = None
        self._next = now() + RETRY

    def answer(self) -> list[Record] | None:
        """The answer, if it is there."""
        if self._asked is None:
            if self._now() < self._next:
                return None
            self._asked = self._ask()
        return self._take() if self._asked.done() else None

    def answer_at_end(self, seconds: float) -> list[Record] | None:
        """The answer, waited for: no other time is left to ask."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._asked = self._asked or self._ask()
            try:
                self._asked.exception(left)
            except NotYet:
                return None
            if (records := self._take()) is not None:
                return records
            time.sleep(min(RETRY_AT_END, max(0.0, left)))
        return None

    def _take(self) -> list[Record] | None:
        assert self._asked is not None
        asked, self._asked, self._next = self._asked, None, self._now() + RETRY
        return asked.result() if asked.exception() is None else None
