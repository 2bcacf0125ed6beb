"""Snapshots as lines of JSON: for scripts, and where there is neither MLflow nor VisualDL."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from mlflow_tokens.files import append_whole
from mlflow_tokens.run_report import RunReport
from mlflow_tokens.sinks.base import EXIT_TIMEOUT_LOCAL
from mlflow_tokens.snapshot import Point, Snapshot

#: Version of the lines; in the first one of a file.
SCHEMA = 1

#: How every line of ours begins.
_BEGINNINGS = (b'{"schema":', b'{"kind":')
#: Bytes that are read at once in search of a line's beginning.
_BLOCK = 1 << 16


class JsonlSink:
    """Appends to one file, made with its directory when the first snapshot comes.

    The first line is `{"schema", "tags"}`; every other one is a snapshot: `{"kind", "seq", "step",
    "position", "timestamp_ms", "metrics", "counts"}`. The file is open only during a write.
    """

    name = "JSONL"
    in_order = True
    exit_timeout = EXIT_TIMEOUT_LOCAL

    def __init__(self, path: Path, tags: Mapping[str, str]) -> None:
        self._path = path
        self._tags = dict(tags)

    def write(self, snapshots: Sequence[Snapshot], skip: AbstractSet[Point] = frozenset()) -> None:
        """Append a line for each snapshot of which not every point is in `skip`.

        Raises:
            OSError: the disk does not take it; then no line was written.
        """
        lines = [line for snapshot in snapshots if (line := self._line(snapshot, skip)) is not None]
        if not lines:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(file).st_size
            partial = _partial_line(file, size)
            if partial and _is_ours(partial):
                size -= len(partial)
                os.ftruncate(file, size)
            elif partial:
                lines.insert(0, b"\n")  # not ours to cut
            if size == 0:
                lines.insert(0, _encode({"schema": SCHEMA, "tags": self._tags}))
            append_whole(file, b"".join(lines), size)
        finally:
            os.close(file)

    def stored(self) -> AbstractSet[Point]:
        """The points of the file's intact lines.

        Raises:
            OSError: it cannot be read.
        """
        return frozenset(self._read()) if self._path.exists() else frozenset()

    def attach(self, report: RunReport) -> None:
        """Nothing: a line is a snapshot."""

    def close(self, status: str) -> None:
        """Nothing: the file is complete after every write."""

    def _line(self, snapshot: Snapshot, skip: AbstractSet[Point]) -> bytes | None:
        place = (snapshot.position, snapshot.timestamp_ms)
        left = {name: value for name, value in snapshot.metrics.items() if (name, *place) not in skip}
        if not left:
            return None
        return _encode(
            {
                "kind": snapshot.kind,
                "seq": snapshot.seq,
                "step": snapshot.step,
                "position": snapshot.position,
                "timestamp_ms": snapshot.timestamp_ms,
                # JSON knows no NaN: what has become unknown is null.
                "metrics": {k: v if math.isfinite(v) else None for k, v in left.items()},
                "counts": dict(snapshot.counts),
            }
        )

    def _read(self) -> Iterator[Point]:
        with self._path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    return  # what a killed process left
                try:
                    content = json.loads(line)
                    position, timestamp_ms = content["position"], content["timestamp_ms"]
                    for name in content["metrics"]:
                        yield name, position, timestamp_ms
                except (ValueError, KeyError, TypeError):
                    continue  # the first line, or somebody else's


def _encode(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _is_ours(partial: bytes) -> bool:
    """Whether half a line is what a killed process left of one of our lines."""
    return any(partial.startswith(begin) or begin.startswith(partial) for begin in _BEGINNINGS)


def _partial_line(file: int, size: int) -> bytes:
    """What follows the last end of a line; nothing if the file ends with one."""
    partial, start = b"", size
    while start > 0 and b"\n" not in partial:
        length = min(_BLOCK, start)
        start -= length
        partial = os.pread(file, length, start) + partial
    return partial[partial.rfind(b"\n") + 1 :]
