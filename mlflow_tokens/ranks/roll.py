"""Who reports, what each said last, and who is still waited for. No sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from mlflow_tokens.meter import Reading
from mlflow_tokens.notices import say_once
from mlflow_tokens.ranks.restart import Restarts
from mlflow_tokens.ranks.wire import Origin, Question, Said

#: Seconds that the ranks behind a relay that is gone have to come by themselves.
ORPHANED = 2.0

_RESTARTED = (
    "Rank %d was restarted, and the others were not: tokens of the job are unknown from here on (what it had "
    "done since it last reported, and what it does again, nobody can tell). Its device's time goes on."
)
_ROOTLESS = (
    "Rank %d reported to another rank 0 before: its totals are not those of this run, and are not taken. "
    "Restart all ranks together."
)

#: A connection, whatever stands for it.
Link = Any


class Roll:
    """The ranks that are to report. Its caller sees to it that one thread calls it at a time.

    keeps: of a rank that is restarted, what it had before is kept, and one that has served another rank 0
    is not taken; a relay leaves both to rank 0.
    """

    def __init__(
        self, ranks: Iterable[int], *, keeps: bool, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._ranks = frozenset(ranks)
        self._keeps, self._now = keeps, now
        self.root = 0
        """Rank 0 as a random number, once it is known; see `Origin`."""
        # No objects more than these for each rank: collecting garbage costs more than adding up.
        self._serials: dict[int, int] = {}
        self._readings: dict[int, Reading] = {}
        self._final: dict[int, Reading] = {}
        self.number = 0
        self.question: Question | None = None
        self.waiting: set[int] = set()
        """Ranks that have not answered the question, and are waited for."""
        self.answered: set[int] = set()
        self.last: dict[int, Said] = {}
        """What ranks have said last. Until they are gone they still answer for steps before."""
        self._waits_for_absent = False
        self._behind: set[int] = set()
        self._origins: dict[int, Origin] = {}
        self._links: dict[int, set[Link]] = {}
        self._ranks_over: dict[Link, set[int]] = {}
        self._former: dict[int, set[int]] = {}
        self._heard: dict[int, float] = {}
        self._restarts = Restarts()
        self._orphans: dict[int, float] = {}

    def ask(self, question: Question, *, wait_for_absent: bool) -> None:
        """A new question: ranks that are connected are waited for, and those that have never been if told."""
        self.number += 1
        self.question, self._waits_for_absent = question, wait_for_absent
        self.answered = set()
        self.waiting = {rank for rank in self._links.keys() | self._orphans.keys() if self._is_due(rank)}
        if wait_for_absent:
            self.waiting |= self._ranks - self._serials.keys()

    def newest(self) -> dict[int, Reading]:
        """The answers to the question, and of other ranks the newest reading, or what they said last."""
        return self._readings | {rank: self._final[rank] for rank in self._final.keys() - self.answered}

    def give_up(self) -> None:
        """It takes too long: who has not answered is not waited for again until it has caught up."""
        self._behind |= self.waiting & self._links.keys()
        self.waiting = set()

    def said(self, ranks: Iterable[int]) -> list[Said]:
        """The newest of these, which have said something."""
        return [Said(self._serials[rank], self._readings[rank]) for rank in sorted(ranks)]

    def origins(self) -> list[Origin]:
        """Of the ranks that are connected."""
        return [self._origins[rank] for rank in sorted(self._links)]

    def connect(self, link: Link, origins: Collection[Origin]) -> set[int]:
        """The link speaks for these from now on, and for no others; returns those whose word is taken."""
        taken = {origin.rank for origin in origins if origin.rank in self._ranks and self._admit(origin)}
        for rank in self._ranks_over.pop(link, set()) - taken:
            self._leave(link, rank)
        self._ranks_over[link] = taken
        for rank in taken:
            self._links.setdefault(rank, set()).add(link)
            self._orphans.pop(rank, None)
            if self._is_due(rank):
                self.waiting.add(rank)
        return taken

    def disconnect(self, link: Link, *, relay: bool) -> None:
        """The link is gone; relay: ranks that spoke over it will come by themselves."""
        for rank in self._ranks_over.pop(link, set()):
            if relay and len(self._links[rank]) == 1 and rank not in self.last:
                self._orphans[rank] = self._now() + ORPHANED
            self._leave(link, rank)

    def orphaned_until(self) -> float | None:
        """Until when ranks are expected whose relay is gone. Those that should have come are given up."""
        now = self._now()
        for rank in [rank for rank, until in self._orphans.items() if until <= now]:
            del self._orphans[rank]
            self._forget(rank)
        return min(self._orphans.values(), default=None)

    def take(self, number: int, said: Iterable[Said]) -> list[int]:
        """Readings that were said in answer to question `number`; returns the ranks that say their last."""
        last = []
        now = self._now() if self._keeps else 0.0
        question, asked = self.question, number == self.number
        for one in said:
            reading = one.reading
            rank = reading.rank
            if reading.final:
                last.append(rank)
            if one.serial <= self._serials.get(rank, -1):
                continue
            self._serials[rank] = one.serial
            self._heard[rank] = now
            if rank in self._restarts:
                sources = {name for other in self._readings.values() for name in other.by_source}
                reading = self._restarts.continued(reading, now, sources)
            self._readings[rank] = reading
            if reading.final:
                self.last[rank], self._final[rank] = one, reading
            if asked and question is not None:
                self.answered.add(rank)
                (self._behind.discard if reading.step >= question.step else self._behind.add)(rank)
            if not self._is_due(rank):
                self.waiting.discard(rank)
        return last

    def _is_due(self, rank: int) -> bool:
        question = self.question
        if question is None:
            return False
        if rank in self.last and (question.live or question.step >= self.last[rank].reading.step):
            return False
        if rank in self._behind and not question.live:
            return False
        return question.last or rank not in self.answered

    def _leave(self, link: Link, rank: int) -> None:
        links = self._links[rank]
        links.discard(link)
        if not links:
            del self._links[rank]
            if rank not in self._orphans:
                self._forget(rank)

    def _forget(self, rank: int) -> None:
        if rank not in self._links and (rank in self._serials or not self._waits_for_absent):
            self.waiting.discard(rank)

    def _admit(self, origin: Origin) -> bool:
        """Whether this process speaks for the rank; the newest does."""
        rank, before = origin.rank, self._origins.get(origin.rank)
        if self._keeps and origin.root not in (0, self.root):
            say_once("ranks root", _ROOTLESS, rank)
            return False
        if before is None or before[:3] == origin[:3]:
            self._origins[rank] = origin
            return True
        if origin.process == before.process:
            # The script has made a tracker after another: what it counts belongs to rank 0's next one, too.
            if origin.tracker < before.tracker or rank in self.last:
                return False
        elif origin.process in self._former.setdefault(rank, set()):
            return False
        else:
            self._former[rank].add(before.process)
        self._origins[rank] = origin
        self.last.pop(rank, None)
        final = self._final.pop(rank, None)
        if self._serials.pop(rank, None) is not None and self._keeps:
            say_once("ranks restarted", _RESTARTED, rank)
            self._restarts.begin(final or self._readings[rank], self._heard[rank])
        return True
