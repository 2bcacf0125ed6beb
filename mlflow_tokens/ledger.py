"""Records in, snapshots out: the same for a run that is under way and for a journal that is read again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from mlflow_tokens.account import Account, fold
from mlflow_tokens.metrics import CHECKPOINT_METRICS, TOTALS
from mlflow_tokens.profile import Profile
from mlflow_tokens.records import CarriedOver, Quantities, Record, Rollback, SegmentStart
from mlflow_tokens.snapshot import Snapshot, derive

#: Checkpoints that go to the sinks; from then on one in so many seconds. The journal has all of them.
CHECKPOINTS, CHECKPOINT_INTERVAL = 200, 1200.0


class Ledger:
    """The account so far, and what depends on the snapshots before: windows, and what was known."""

    def __init__(self) -> None:
        self.account = Account()
        self.profile = Profile()
        self._window_start: Account | None = None
        self._known: set[str] = set()
        self._assumed: set[str] = set()
        self._checkpoints, self._last_checkpoint = 0, -math.inf

    def apply(self, record: Record) -> Snapshot | None:
        """Fold one record; of quantities there is a snapshot, except of some checkpoints."""
        before = self.account
        self.account = fold(before, record)
        self.profile.apply(record)
        if isinstance(record, SegmentStart | Rollback):
            self._window_start = None
        if isinstance(record, CarriedOver) and record.high_water and record.source != "unasked":
            # The run has series already, of which this journal holds nothing.
            self._assumed = {f"tokens/{kind}" for kind in record.tokens} or set(CHECKPOINT_METRICS)
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
        now = self.account
        return replace(snapshot, high_water=now.high_water if now.position < now.high_water else None)

    def _checkpoint_is_due(self) -> bool:
        self._checkpoints += 1
        if (
            self._checkpoints > CHECKPOINTS
            and self.account.elapsed - self._last_checkpoint < CHECKPOINT_INTERVAL
        ):
            return False
        self._last_checkpoint = self.account.elapsed
        return True

    def _close_unknown(self, snapshot: Snapshot) -> Snapshot:
        """End the series of a total that has become unknown with one NaN.

        A store's latest value would stay the last one known, and be read as the run's.
        """
        totals = {name for name in snapshot.metrics if name in TOTALS}
        if snapshot.kind in ("heartbeat", "checkpoint"):
            # These end nothing, but what they log is known from then on.
            self._known |= totals
            return snapshot
        # Whether a run of unknown past had a cost is unknown, too: without a price now, none is ended.
        assumed = {name for name in self._assumed if self.account.price or not name.startswith("cost/")}
        unknown = dict.fromkeys(sorted((self._known | assumed) - totals), math.nan)
        self._known, self._assumed = totals, set()
        return replace(snapshot, metrics={**snapshot.metrics, **unknown})


def replay(records: Iterable[Record], after_seq: int = 0) -> Iterator[Snapshot]:
    """The snapshots of a journal whose number is greater than `after_seq`, in order."""
    ledger = Ledger()
    for record in records:
        snapshot = ledger.apply(record)
        if snapshot is not None and snapshot.seq > after_seq:
            yield snapshot
