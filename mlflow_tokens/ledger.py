"""Records in, snapshots out: the same for a run that is under way and for a journal that is read again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from mlflow_tokens.account import Account, fold
from mlflow_tokens.metrics import TOTALS, Snapshot, derive
from mlflow_tokens.records import Quantities, Record, Rollback, SegmentStart

#: Seconds between two mirrored snapshots of a run that is below its high-water step: doubled from the
#: first to the last, so that an old checkpoint does not fill the store.
MIRROR_FIRST, MIRROR_LAST = 30.0, 600.0
#: Checkpoints that go to the sinks; from then on one in so many seconds. The journal has all of them.
CHECKPOINTS, CHECKPOINT_INTERVAL = 200, 600.0


class Ledger:
    """The account so far, and what depends on the snapshots before: windows, mirrors, what was known."""

    def __init__(self) -> None:
        self.account = Account()
        self._window_start: Account | None = None
        self._known: set[str] = set()
        self._mirror = _Pace(MIRROR_FIRST, MIRROR_LAST)
        self._checkpoints, self._last_checkpoint = 0, -math.inf

    def apply(self, record: Record) -> Snapshot | None:
        """Fold one record; of quantities there is a snapshot, except of some checkpoints."""
        before = self.account
        self.account = fold(before, record)
        if isinstance(record, SegmentStart | Rollback):
            self._window_start = None
        if not isinstance(record, Quantities):
            return None
        if self._window_start is None:
            # A segment's first window begins with it, once its price is known: what it trained before a
            # restart is no speed of its own.
            self._window_start = before
        if record.kind == "checkpoint" and not self._checkpoint_is_due():
            return None
        snapshot = self._close_unknown(derive(self.account, self._window_start, record.kind, record.seq))
        if record.kind == "step":
            self._window_start = self.account
        return replace(snapshot, mirror=self._mirror_position(record))

    def _checkpoint_is_due(self) -> bool:
        self._checkpoints += 1
        if (
            self._checkpoints > CHECKPOINTS
            and self.account.elapsed - self._last_checkpoint < CHECKPOINT_INTERVAL
        ):
            return False
        self._last_checkpoint = self.account.elapsed
        return True

    def _mirror_position(self, record: Quantities) -> int | None:
        """Where the latest value of a store stands: at the high-water step, while we are below it."""
        now = self.account
        if now.position >= now.high_water:
            self._mirror.reset()
            return None
        if record.kind == "checkpoint" or not (self._mirror.is_due(now.elapsed) or record.kind == "final"):
            return None
        return now.high_water

    def _close_unknown(self, snapshot: Snapshot) -> Snapshot:
        """End the series of a total that has become unknown with one NaN.

        A store's latest value would stay the last one known, and be read as the run's.
        """
        if snapshot.kind in ("heartbeat", "checkpoint"):
            return snapshot
        totals = {name for name in snapshot.metrics if name in TOTALS}
        unknown = dict.fromkeys(sorted(self._known - totals), math.nan)
        self._known = totals
        return replace(snapshot, metrics={**snapshot.metrics, **unknown})


class _Pace:
    """Due at once, then after `first` seconds, twice as many, and so on up to `last`."""

    def __init__(self, first: float, last: float) -> None:
        self._first, self._last = first, last
        self.reset()

    def reset(self) -> None:
        self._wait, self._next = self._first, -math.inf

    def is_due(self, now: float) -> bool:
        if now < self._next:
            return False
        self._next = now + self._wait
        self._wait = min(2 * self._wait, self._last)
        return True


def replay(records: Iterable[Record], after_seq: int = 0) -> Iterator[Snapshot]:
    """The snapshots of a journal whose number is greater than `after_seq`, in order."""
    ledger = Ledger()
    for record in records:
        snapshot = ledger.apply(record)
        if snapshot is not None and snapshot.seq > after_seq:
            yield snapshot
