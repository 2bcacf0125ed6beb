"""The first rank of a node between the others there and rank 0, which has 8 or 16 times fewer connections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from mlflow_tokens.ranks.job import Address, Job
from mlflow_tokens.ranks.server import RankServer
from mlflow_tokens.ranks.wire import Origin, Question, Said


def relay_of(job: Job) -> Relay | None:
    """What this rank relays for others with, if it is to; they do without where its port is taken."""
    if not job.relayed or job.relay is None:
        return None
    with suppress(OSError):
        return Relay(job, job.relay)
    return None


class News(NamedTuple):
    """What a relay has for rank 0.

    origins: of the ranks connected. answers: to the question of now, not handed out before. complete: no
    other is waited for. last: of ranks that have said their last, which rank 0 has not confirmed.
    """

    origins: Sequence[Origin] = ()
    answers: Sequence[Said] = ()
    complete: bool = True
    last: Sequence[Said] = ()


class Relay(RankServer):
    """Asks the node's other ranks rank 0's questions, and keeps what they say until it is fetched.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, job: Job, address: Address) -> None:
        self._told: Callable[[], None] = lambda: None
        self._handed: set[int] = set()
        self._confirmed: set[int] = set()
        super().__init__(job, address, relays=True)

    def tell(self, told: Callable[[], None]) -> None:
        """Call it, on any thread, whenever there may be news."""
        self._told = told

    def ask(self, question: Question, root: int) -> None:
        """Ask rank 0's question: `root` says which rank 0's."""
        with self._changed:
            self._roll.root = root
            self._roll.ask(question, wait_for_absent=False)
            self._handed.clear()
        self._waker.wake()

    def news(self) -> News:
        """What there is; answers are handed out once."""
        with self._changed:
            roll = self._roll
            answers = roll.said(roll.answered - self._handed)
            self._handed |= roll.answered
            last = [roll.last[rank] for rank in sorted(roll.last.keys() - self._confirmed)]
            return News(roll.origins(), answers, not roll.waiting, last)

    def all_said_last(self) -> bool:
        """Whether rank 0 has heard the last of every rank that is connected."""
        with self._changed:
            return all(origin.rank in self._confirmed for origin in self._roll.origins())

    def heard(self, ranks: Iterable[int]) -> None:
        """Rank 0 has heard the last of these."""
        with self._changed:
            self._confirmed |= set(ranks)
        self._heard.extend(ranks)
        self._waker.wake()

    def _tell(self) -> None:
        self._told()
