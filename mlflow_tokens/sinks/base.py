"""What a sink is: a place that snapshots are written to."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from mlflow_tokens.run_report import RunReport
from mlflow_tokens.snapshot import Point, Snapshot

#: Seconds that the end of a run waits for a sink across a network, and for one on this machine, which
#: may have to make its database first.
EXIT_TIMEOUT_REMOTE, EXIT_TIMEOUT_LOCAL = 5.0, 30.0

_ours = threading.local()


def mark_our_thread() -> None:
    """Say that this thread writes our own metrics."""
    _ours.writing = True


def is_our_thread() -> bool:
    """Whether this thread writes our own metrics, so that nobody mistakes them for the script's."""
    return getattr(_ours, "writing", False)


class Sink(Protocol):
    """A place for snapshots. All methods are called from one background thread."""

    name: str
    exit_timeout: float
    """Seconds that the end of a run waits for this sink."""
    in_order: bool
    """Whether snapshots must come in the order of their time."""

    def write(self, snapshots: Sequence[Snapshot], skip: AbstractSet[Point] = frozenset()) -> None:
        """Write the points of some snapshots, but for those in `skip`.

        May raise; it may then be called again with the same ones, and what `stored` says in `skip`.
        """

    def stored(self) -> AbstractSet[Point]:
        """The points that are there already: after a failed write, or from an earlier process. May raise."""

    def attach(self, report: RunReport) -> None:
        """Keep the report of a run that has ended, where the sink has a place for it. May raise."""

    def close(self, status: str) -> None:
        """The run has ended with `status` (FINISHED, FAILED or KILLED). May raise."""
