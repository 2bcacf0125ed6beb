"""The journal read without the package: JSON lines behind a CRC-32, and what befalls them on a bad disk."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]


def read(path: Path) -> list[Line]:
    """The intact records, in order; one that is written twice in a row counts once."""
    records: list[Line] = []
    before = b""
    for line in path.read_bytes().split(b"\n"):
        if line != before and _is_intact(line):
            records.append(json.loads(line[9:]))
            before = line
    return records


def journals(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.jsonl")) if directory.is_dir() else []


def _is_intact(line: bytes) -> bool:
    return line[8:9] == b" " and line[:8] == b"%08x" % zlib.crc32(line[9:])


def corrupt(path: Path, numbers: random.Random, count: int) -> bool:
    """Flip a byte in some lines; whether there were any."""
    lines = path.read_bytes().split(b"\n")
    full = [number for number, line in enumerate(lines) if len(line) > 10]
    for number in numbers.sample(full, min(count, len(full))):
        line = bytearray(lines[number])
        place = numbers.randrange(len(line))
        line[place] ^= 1 << numbers.randrange(7)
        # A damage that ends a line is another one: see `tear`.
        lines[number] = bytes(line).replace(b"\n", b"?")
    path.write_bytes(b"\n".join(lines))
    return bool(full)


def tear(path: Path, numbers: random.Random) -> bool:
    """Cut the last line, or put half a line after it, as a machine does that loses power while it writes."""
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    length = len(whole) - last
    if length < 3:
        return False
    keep = last + numbers.randrange(1, length - 1)
    path.write_bytes(whole[:keep] if numbers.random() < 0.5 else whole + whole[last:keep])
    return True
