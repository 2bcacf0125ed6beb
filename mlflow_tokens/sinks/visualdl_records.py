"""VisualDL's record files: encode, append, read, repair.

A record is its length in bytes (8 bytes, little-endian) and a protobuf message, without a checksum. A
reader of VisualDL stops at half a record, and one that goes on behind it takes any bytes for a length; so
nothing may be appended to a file before its end was found to be whole.

The bytes are VisualDL's own (its messages, its `RecordWriter`), but its `LogWriter` is not used: its
thread swallows the error of a full disk and writes the next record behind half of the last one, drops a
record when the directory is gone, opens the file once a record, and prints to the script's output.
"""

from __future__ import annotations

import io
import itertools
import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mlflow_tokens.notices import say_once
from mlflow_tokens.snapshot import Point

#: No record of ours has more bytes: a metric's name and some 40 more, or a small image.
LONGEST = 16_000

_LENGTH = struct.Struct("<Q")


def encode_points(points: Iterable[tuple[Point, float]], head: bool) -> bytes:
    """Scalar records; `head`: behind the record that a file begins with. No points: no bytes."""
    from visualdl.component.base_component import meta_data, scalar
    from visualdl.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for (name, step, walltime), value in points:
        if head:
            writer.write(meta_data(walltime=walltime).SerializeToString())
            head = False
        writer.write(scalar(tag=name, value=value, step=step, walltime=walltime).SerializeToString())
    return buffer.getvalue()


def read_points(path: Path) -> Iterator[Point]:
    """The points of the intact part of a file. No file: none.

    Raises:
        OSError: the file cannot be read.
    """
    if path.exists():
        for value, _ in _read(path):
            if value.WhichOneof("one_value") == "value":
                yield value.tag, value.id, value.timestamp


def repair(path: Path) -> int:
    """Cut a file after its last intact record; the bytes that are left.

    What a killed process left of its last record goes. Anything else behind the intact part is kept in a
    file beside it, and said.

    Raises:
        OSError: the file cannot be read or cut; it is as it was.
    """
    end = max((end for _, end in _read(path)), default=0)
    size = path.stat().st_size
    if end == size:
        return end
    aside = None if _is_cut_off(path, end, size) else _copy_aside(path, end)
    try:
        os.truncate(path, end)
    except OSError:
        if aside is not None:
            aside.unlink()
        raise
    if aside is not None:
        say_once(
            f"damaged:{path}",
            "%s is damaged after byte %d: the rest is now in %s, and what comes is written in its place.",
            path,
            end,
            aside.name,
        )
    return end


def _read(path: Path) -> Iterator[tuple[Any, int]]:
    """The values from the start of the file to the first damage, each with the offset at which it ends."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from visualdl.proto.record_pb2 import Record

    with path.open("rb") as file:
        size, end = os.fstat(file.fileno()).st_size, 0
        while len(header := file.read(_LENGTH.size)) == _LENGTH.size:
            start = end + _LENGTH.size
            (length,) = _LENGTH.unpack(header)
            if length > size - start:
                return
            record = Record()
            try:
                record.ParseFromString(file.read(length))
            except DecodeError:
                return
            # Zeros, which a file system may leave after a power cut, are an empty message.
            if not record.values or record.values[0].WhichOneof("one_value") is None:
                return
            end = start + length
            yield record.values[0], end


def _is_cut_off(path: Path, start: int, size: int) -> bool:
    """Whether the rest from `start` is the beginning of one record of ours."""
    if size - start > LONGEST:
        return False
    with path.open("rb") as file:
        file.seek(start)
        header, message = file.read(_LENGTH.size), file.read()
    if len(header) < _LENGTH.size:
        return True
    (length,) = _LENGTH.unpack(header)
    if not max(len(message), 2) < length <= LONGEST:
        return False
    # The message is one field (number 1): its key, the length of the rest in 7 bits a byte, the rest.
    rest = length - 2 if length < 130 else length - 3
    begin = bytes([10, rest]) if rest < 128 else bytes([10, rest & 127 | 128, rest >> 7])
    return begin.startswith(message[: len(begin)])


def _copy_aside(path: Path, start: int) -> Path:
    for number in itertools.count(1):
        # Not a name with "vdlrecords" in it, which VisualDL would read.
        aside = path.with_name(f"tokens.{number}.damaged")
        try:
            target = aside.open("xb")
        except FileExistsError:
            continue
        break
    try:
        with target, path.open("rb") as source:
            source.seek(start)
            shutil.copyfileobj(source, target)
    except OSError:
        aside.unlink()
        raise
    return aside
