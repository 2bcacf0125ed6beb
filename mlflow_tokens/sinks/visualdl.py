"""Snapshots as VisualDL scalars, and the exact integers beside them.

VisualDL keeps scalars as 32-bit floats, in which 1,234,567,890,123 is 1,234,567,954,432: it carries the
curves. What must be exact is in `mlflow_tokens.json` in the same directory.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

from mlflow_tokens.files import append_whole, lock
from mlflow_tokens.run_report import RunReport
from mlflow_tokens.sinks.base import EXIT_TIMEOUT_LOCAL
from mlflow_tokens.sinks.visualdl_records import LONGEST, encode_points, read_points, repair
from mlflow_tokens.sinks.visualdl_report import encode_report
from mlflow_tokens.snapshot import Point, Snapshot

#: A directory of our own: of several record files in one directory VisualDL shows only the last.
SUBDIRECTORY = "tokens"
FILE_NAME = "vdlrecords.tokens.log"
SIDECAR_NAME = "mlflow_tokens.json"
LOCK_NAME = ".lock"


def require_visualdl() -> None:
    """Raises ImportError, saying what to install, where VisualDL is missing."""
    try:
        import visualdl  # noqa: F401
    except ImportError as error:
        raise ImportError("visualdl=… needs VisualDL: pip install 'mlflow-tokens[visualdl]'") from error


class VisualDLSink:
    """Writes under `<log directory>/tokens/`, made when the first snapshot comes.

    From then until `close` the directory is locked against every other job.
    """

    name = "VisualDL"
    in_order = True
    exit_timeout = EXIT_TIMEOUT_LOCAL

    def __init__(self, logdir: Path, tags: Mapping[str, str]) -> None:
        self._directory = logdir / SUBDIRECTORY
        self._records = self._directory / FILE_NAME
        self._tags = dict(tags)
        self._lock = _Lock(self._directory / LOCK_NAME)
        self._size = -1
        """Bytes of the record file after our last write: of any other size it may be damaged."""
        self._last: tuple[int, int] | None = None
        """Position and time in ms of the newest snapshot that was written."""
        self._newest: tuple[int, float] | None = None
        """`seq` and time in ms of the snapshot in the sidecar; None before it was looked at."""

    def write(self, snapshots: Sequence[Snapshot], skip: AbstractSet[Point] = frozenset()) -> None:
        """Append a scalar for every metric, then put the newest snapshot into the sidecar.

        Raises:
            OSError: the disk does not take it (no scalar was written, or else all of them), or another
                job writes to this directory.
        """
        if not snapshots:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        self._append(snapshots, skip)
        newest = max(snapshots, key=lambda snapshot: snapshot.seq)
        self._last = newest.position, newest.timestamp_ms
        self._update_sidecar(newest)

    def stored(self) -> AbstractSet[Point]:
        """The points in the intact part of the record file.

        Raises:
            OSError: it cannot be read.
        """
        return frozenset(read_points(self._records))

    def attach(self, report: RunReport) -> None:
        """Append a histogram of the row lengths and a heat map of padding, at the newest snapshot's step.

        Raises:
            OSError: as for `write`.
        """
        if self._last is None:
            return
        data = encode_report(report.tokens, *self._last)
        if data and len(data) < LONGEST:
            self._append_bytes(lambda head: data)

    def close(self, status: str) -> None:
        """Let others write to the directory; the files are complete after every write."""
        self._lock.release()

    def _append(self, snapshots: Sequence[Snapshot], skip: AbstractSet[Point]) -> None:
        points = (
            (point, value)
            for snapshot in snapshots
            for point, value in snapshot.points()
            if point not in skip
        )
        self._append_bytes(lambda head: encode_points(points, head=head))

    def _append_bytes(self, encode: Callable[[bool], bytes]) -> None:
        """Append what `encode` gives, which is told whether it is the beginning of the file."""
        # Opened every time: the directory may have been removed, and NFS reports a full disk on closing.
        file = os.open(self._records, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if os.fstat(file).st_size != self._size:
                self._size = repair(self._records)
            data = encode(self._size == 0)
            append_whole(file, data, self._size)
        finally:
            os.close(file)
        self._size += len(data)

    def _update_sidecar(self, snapshot: Snapshot) -> None:
        """Replace the sidecar, unless a newer snapshot is in it: a backlog may come late."""
        if self._newest is None:
            self._newest = self._read_sidecar()
        seq, timestamp_ms = self._newest
        # What an earlier process left may be of another run, whose seq says nothing about ours: time decides.
        if snapshot.seq <= seq and snapshot.timestamp_ms <= timestamp_ms and self._sidecar.exists():
            return
        content = {
            "tags": self._tags,
            "seq": snapshot.seq,
            "step": snapshot.step,
            "position": snapshot.position,
            "timestamp_ms": snapshot.timestamp_ms,
            "counts": dict(snapshot.counts),
            # JSON knows no NaN: what has become unknown is null.
            "metrics": {k: v if math.isfinite(v) else None for k, v in snapshot.metrics.items()},
        }
        partial = self._sidecar.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(content, ensure_ascii=False, indent=1), "utf-8")
            os.replace(partial, self._sidecar)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        # From here on it is this run's, and seq alone decides: clocks may be put back.
        self._newest = snapshot.seq, math.inf

    @property
    def _sidecar(self) -> Path:
        return self._directory / SIDECAR_NAME

    def _read_sidecar(self) -> tuple[int, float]:
        try:
            content = json.loads(self._sidecar.read_text("utf-8"))
            return int(content["seq"]), int(content["timestamp_ms"])
        except (OSError, ValueError, KeyError, TypeError):
            return -1, -1


class _Lock:
    """A lock file, held against other processes and other sinks of this one; a killed process lets go."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1

    def acquire(self) -> None:
        """Hold the lock, unless it is held already. A file system without locks has none to hold.

        Raises:
            OSError: someone else holds it, or the file cannot be made.
        """
        if self._file >= 0:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._file), os.stat(self._path)):
                    return
            self.release()  # the directory was removed, and the lock with it
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            lock(file)
        except OSError as error:
            os.close(file)
            if isinstance(error, BlockingIOError):
                message = "another job writes its VisualDL logs to this directory"
                raise OSError(errno.EBUSY, message, str(self._path.parent)) from None
            raise
        self._file = file
        _held.add(self)

    def release(self) -> None:
        """Let go of the lock."""
        _held.discard(self)
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


_held: set[_Lock] = set()


def _let_go_in_child() -> None:
    """A forked child (a worker that loads data, say) would keep the lock after its parent's death."""
    for held in list(_held):
        held.release()


os.register_at_fork(after_in_child=_let_go_in_child)
