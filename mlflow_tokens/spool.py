"""The snapshots of a run on their way to the sinks: the newest in memory, all of them in the journal."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from mlflow_tokens.notices import say_once
from mlflow_tokens.snapshot import Snapshot

#: Snapshots that are kept in memory; a sink that is further behind is served from the journal.
RECENT = 2048
#: Snapshots that are read from the journal at once.
CHUNK = 512


class Spool:
    """Snapshots in the order of their numbers; every sink reads on from where it is.

    Args:
        from_disk: the snapshots of the journal after a number.
    """

    def __init__(self, from_disk: Callable[[int], Iterable[Snapshot]]) -> None:
        self._from_disk = from_disk
        self._recent: deque[Snapshot] = deque(maxlen=RECENT)
        self._read: tuple[int, list[Snapshot]] = 0, []
        # What was read from the journal last, and the number that it comes after.
        self.changed = threading.Condition()
        self.newest = 0
        """The number of the newest snapshot."""
        self.begun = False
        self.start = 0
        """The number that a sink begins after. Meaningful once begun."""
        self.backlog_end = 0
        """Snapshots up to this number are of an earlier process, which may have written some of them."""
        self.restated = 0
        """How many times snapshots that were there have been replaced by some that say more."""

    def begin(self, earlier: Iterable[Snapshot], *, delivered: bool) -> None:
        """Start after the snapshots of earlier processes, which the sinks have (`delivered`) or may lack."""
        with self.changed:
            self._recent.extend(earlier)
            self.newest = self._recent[-1].seq if self._recent else 0
            self.start, self.backlog_end = (self.newest, 0) if delivered else (0, self.newest)
            self.begun = True
            self.changed.notify_all()

    def add(self, snapshot: Snapshot) -> None:
        """Append a snapshot and wake the sinks."""
        with self.changed:
            self._recent.append(snapshot)
            self.newest = snapshot.seq
            self.changed.notify_all()

    def restate(self, snapshots: Iterable[Snapshot]) -> None:
        """Take these in the place of all that are there: they say more, and sinks write what they lack."""
        with self.changed:
            self._recent.clear()
            self._recent.extend(snapshots)
            self._read = 0, []
            self.restated += 1
            self.changed.notify_all()

    def after(self, seq: int, limit: int) -> list[Snapshot]:
        """The next snapshots after a number, `limit` of them at most."""
        with self.changed:
            recent = list(self._recent)
            newest = self.newest
        if seq >= newest:
            return []
        if len(recent) < RECENT or recent[0].seq <= seq + 1:
            return list(islice((snapshot for snapshot in recent if snapshot.seq > seq), limit))
        try:
            return self._chunk(seq, recent[0].seq)[:limit]
        except (OSError, ValueError) as error:
            say_once("spool", "Some points are lost: the journal cannot be read again (%s).", error)
            return recent[:limit]

    def _chunk(self, seq: int, until: int) -> list[Snapshot]:
        after, chunk = self._read
        if not chunk or not after <= seq < chunk[-1].seq:
            # All of the journal is read for it, which takes seconds for a long one.
            older: Iterator[Snapshot] = (item for item in self._from_disk(seq) if item.seq < until)
            chunk = list(islice(older, CHUNK))
            self._read = seq, chunk
        if chunk:
            return [snapshot for snapshot in chunk if snapshot.seq > seq]
        with self.changed:
            return list(self._recent)
