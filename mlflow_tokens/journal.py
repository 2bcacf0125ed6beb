"""Records on disk: append, read, recover. One file a run, one line a record.

A line is the CRC-32 of the JSON in 8 hex digits, a space, the JSON. A line that was cut off or damaged
fails its checksum and is left out; quantities are cumulative, so the lines around it stand on their own.
Records that quantities do not repeat (a price, a rollback) are written twice: one damaged line loses
none of them.
"""

from __future__ import annotations

import errno
import json
import os
import weakref
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlflow_tokens.files import lock
from mlflow_tokens.records import CarriedOver, Quantities, Record, Rollback, decode, encode

#: Where journals go unless told otherwise, under the working directory.
DEFAULT_DIRECTORY = Path(".mlflow_tokens")
#: From this size on, in bytes, a run is recorded once an hour, and at checkpoints up to twice the size.
#: A million steps write an eighth of it.
FULL = 64 << 20
#: Lines that wait in memory while the disk takes none.
UNWRITTEN = 4096
#: The last record of a journal lies in its last so many bytes.
TAIL = 1 << 16

_UNASKED, _LATE = b'"source":"unasked"', b'"late":true'


class JournalTaken(OSError):
    """Another process is writing this journal."""


class Journal:
    """An append-only file of records, locked against every other process (and tracker) while it is open.

    Args:
        create: make the file and its directory if they are not there.

    Raises:
        JournalTaken: someone else has it open.
        OSError: the directory cannot be made or the file cannot be opened.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | (os.O_CREAT if create else 0), 0o644)
        try:
            self._lock()
            self._length = os.fstat(self._file).st_size
        except OSError:
            os.close(self._file)
            raise
        self._torn = self._length > 0 and os.pread(self._file, 1, self._length - 1) != b"\n"
        self._unwritten: deque[bytes] = deque()
        _open.add(self)

    @property
    def size(self) -> int:
        """Bytes written."""
        return self._length

    def append(self, record: Record) -> None:
        """Write one record; it is with the operating system when this returns (a killed process keeps it).

        Raises:
            OSError: the disk did not take it. It waits in memory and goes first the next time.
        """
        text = json.dumps(encode(record), ensure_ascii=False, separators=(",", ":")).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        if not isinstance(record, Quantities):
            self._unwritten.append(2 * line)
        elif len(self._unwritten) < UNWRITTEN:
            self._unwritten.append(line)
        else:
            # Quantities are cumulative: the newest ones say what those they replace said.
            self._unwritten[-1] = line
        self.write_rest()

    def write_rest(self) -> None:
        """Write what the disk has not taken yet.

        Raises:
            OSError: it still does not.
        """
        while self._unwritten:
            self._write(self._unwritten[0])
            self._unwritten.popleft()

    def rename(self, name: str) -> None:
        """Give the file another name in its directory, unless a file there has it already.

        Raises:
            OSError: it cannot be renamed; it keeps its name.
        """
        path = self.path.with_name(name)
        # A link never replaces what another process may have put there, as renaming would.
        os.link(self.path, path)
        os.unlink(self.path)
        self.path = path

    def close(self) -> None:
        """Hand what is written to the disk and close the file.

        Raises:
            OSError: the disk does not take it, or has not taken some record before.
        """
        _open.discard(self)
        file, self._file = self._file, -1
        try:
            os.fsync(file)
        finally:
            os.close(file)
        if self._unwritten:
            raise OSError(errno.EIO, f"{len(self._unwritten)} records could not be written")

    def _write(self, line: bytes) -> None:
        data = b"\n" + line if self._torn else line
        try:
            written = os.write(self._file, data)
        except OSError:
            self._cut()
            raise
        if written == len(data):
            self._length += written
            self._torn = False
            return
        self._cut()
        raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes of a record fitted")

    def _cut(self) -> None:
        """Take back what was written of a record that did not fit; or else begin the next on a new line."""
        try:
            os.ftruncate(self._file, self._length)
        except OSError:
            self._torn = True

    def _lock(self) -> None:
        try:
            lock(self._file)
        except BlockingIOError:
            raise JournalTaken(errno.EWOULDBLOCK, "another process is writing it", str(self.path)) from None

    def forget_in_child(self) -> None:
        """In a forked child: give up the descriptor, which would keep the lock after the parent's death."""
        if self._file >= 0:
            with suppress(OSError):
                os.close(self._file)
            self._file = -1


_open: weakref.WeakSet[Journal] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for journal in list(_open):
        journal.forget_in_child()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def read_journal(path: Path) -> Iterator[Record]:
    """The intact records of a journal, in the order they were written; a repeated line once.

    What MLflow said late of the time before the journal stands where it was asked.

    Raises:
        OSError: the file cannot be read.
        ValueError: an intact record is of another schema.
    """
    answers = late_answers(path)
    asked, before = 0, b""
    with path.open("rb") as file:
        for line in file:
            payload = _check(line)
            if payload is None or line == before:
                continue
            before = line
            record = decode(payload)
            if isinstance(record, CarriedOver | Rollback):
                if record.late:
                    continue
                asked += isinstance(record, CarriedOver) and record.source == "unasked"
                record = answers.pop((asked, type(record)), record)
            yield record


def late_answers(path: Path) -> dict[tuple[int, type], CarriedOver | Rollback]:
    """What MLflow said of the time before the journal when the run went on already.

    By the number of the question (from 1) and the type of the record in whose place it stands.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is of another schema.
    """
    answers: dict[tuple[int, type], CarriedOver | Rollback] = {}
    asked, before = 0, b""
    with path.open("rb") as file:
        for line in file:
            if line == before or not (_UNASKED in line or _LATE in line):
                continue
            record = decode(payload) if (payload := _check(line)) is not None else None
            if isinstance(record, CarriedOver | Rollback):
                before = line
                if record.late:
                    answers[(asked, type(record))] = record
                else:
                    asked += 1
    return answers


def recorded_times(path: Path) -> set[int]:
    """The times in ms at which a journal has something for MLflow.

    Raises:
        OSError: the file cannot be read.
        ValueError: an intact record is of another schema.
    """
    return {round(record.t_wall * 1000) for record in read_journal(path) if isinstance(record, Quantities)}


def last_quantities(path: Path) -> Quantities | None:
    """The newest intact quantities of a journal, read from its end alone; None if there are none.

    Raises:
        OSError: the file cannot be read.
        ValueError: an intact record is of another schema.
    """
    try:
        with path.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - TAIL))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        payload = _check(line)
        if payload is not None and isinstance(record := decode(payload), Quantities):
            return record
    return None


def _check(line: bytes) -> dict[str, Any] | None:
    checksum, space, text = line.rstrip(b"\n").partition(b" ")
    if not space or checksum != b"%08x" % zlib.crc32(text):
        return None
    payload: dict[str, Any] = json.loads(text)
    return payload
