"""Records on disk: append, read, recover. One file a run, one line a record.

A line is the CRC-32 of the JSON in 8 hex digits, a space, the JSON. A line that was cut off or damaged
fails its checksum and is left out; the lines around it stand on their own, since quantities are
cumulative.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlflow_tokens.records import Record, decode, encode

#: Where journals go unless told otherwise, under the working directory.
DEFAULT_DIRECTORY = Path(".mlflow_tokens")


class Journal:
    """An append-only file of records.

    Raises:
        OSError: the directory cannot be made or the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._end_partial_line()

    def append(self, record: Record) -> None:
        """Write one record; it is with the operating system when this returns (a killed process keeps it)."""
        text = json.dumps(encode(record), ensure_ascii=False, separators=(",", ":")).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        written = os.write(self._file, line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes of a record fitted into {self.path}")

    def close(self) -> None:
        """Hand what is written to the disk and close the file."""
        os.fsync(self._file)
        os.close(self._file)

    def _end_partial_line(self) -> None:
        """A writer that was killed may have left half a line: the next record must not be glued to it."""
        with self.path.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            if length:
                file.seek(length - 1)
                if file.read(1) != b"\n":
                    os.write(self._file, b"\n")


def read_journal(path: Path) -> Iterator[Record]:
    """The intact records of a journal, in the order they were written.

    Raises:
        OSError: the file cannot be read.
        ValueError: an intact record is of another schema.
    """
    with path.open("rb") as file:
        for line in file:
            payload = _check(line)
            if payload is not None:
                yield decode(payload)


def _check(line: bytes) -> dict[str, Any] | None:
    checksum, space, text = line.rstrip(b"\n").partition(b" ")
    if not space or checksum != b"%08x" % zlib.crc32(text):
        return None
    payload: dict[str, Any] = json.loads(text)
    return payload
