"""Files that one process alone writes, and that a full disk does not tear."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

#: What a file system without locks answers.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def lock(file: int) -> None:
    """Lock an open file against everybody else who does. A file system without locks has none to hold.

    Closing the file, which the end of the process does too, unlocks it; but a forked child has it open
    as well.

    Raises:
        BlockingIOError: someone else holds the lock.
        OSError: the file system cannot say.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def append_whole(file: int, data: bytes, size: int) -> None:
    """Append to a file of `size` bytes all of `data`, or else nothing.

    It is with the operating system when this returns: a killed process keeps it.

    Raises:
        OSError: the disk does not take it.
    """
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        # Where even that fails, the next write finds the half record, and the caller what is stored.
        with suppress(OSError):
            os.ftruncate(file, size)
        raise


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a small file of which no half is ever seen.

    Raises:
        OSError: the directory does not exist, or the disk does not take it.
    """
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value), "utf-8")
    os.replace(partial, path)
