"""What goes over a connection: one JSON object a line, and a reading as a row of whole numbers.

A rank that connects says hello, with where its readings come from; the listener answers with its welcome
and then with questions; readings come as rows, many in a line if many ranks speak over one connection.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from types import NoneType
from typing import Any, NamedTuple

from mlflow_tokens.clock import PHASES
from mlflow_tokens.lengths import Lengths
from mlflow_tokens.meter import Reading
from mlflow_tokens.topology import Place

#: Rows of other numbers, or lines that mean something else, are another protocol.
PROTOCOL = 2
#: Differs where readings have other fields.
FIELDS = hashlib.sha256(repr([[field.name for field in fields(Reading)], PHASES]).encode()).hexdigest()[:8]

#: Bytes of the longest line of a rank, and of one that has not said who it is; a line of rows is cut in
#: two where it exceeds `_LINE`, which no row does.
LINE_LIMIT, HELLO_LIMIT, _LINE = 4 << 20, 64 << 10, 256 << 10

#: Lengths of rows are sent again once so much has been added to them: a stage of the token report is 5 %.
_GROWTH = 1 / 64

_NUMBERS = 9 + len(PHASES)
_WHOLE = {int, NoneType}


class Question(NamedTuple):
    """Which totals are wanted: at the end of `step`, or of the newest step with the seconds of now (`live`).

    last: the job is ending, so wait for what each rank says last.
    """

    step: int
    live: bool = False
    last: bool = False


class Origin(NamedTuple):
    """Whose readings: a rank's, of one process, of one of its trackers one after the other.

    process: a random number. root: the rank 0 that it has answered before, a random number, or 0.
    """

    rank: int
    process: int
    tracker: int
    root: int


class Said(NamedTuple):
    """A reading, and its number among those of its origin: a later one has a greater one."""

    serial: int
    reading: Reading


def line(message: Mapping[str, Any]) -> bytes:
    """One line of one message."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def split(buffer: bytes, data: bytes) -> tuple[list[bytes], bytes]:
    """The lines that are complete now, and what has come of the next one."""
    *lines, rest = (buffer + data if buffer else data).split(b"\n")
    return lines, rest


def origins_of(message: Mapping[str, Any]) -> list[Origin]:
    """Raises KeyError, TypeError or ValueError where there are none that make sense."""
    origins = [Origin(*item) for item in message["ranks"]]
    if any(type(number) is not int for origin in origins for number in origin):
        raise ValueError("where readings come from is said in whole numbers")
    return origins


class Encoder:
    """One side of a connection: what changes seldom is said when it has changed."""

    def __init__(self) -> None:
        self._sources: dict[int, Mapping[str, tuple[int | None, int | None]]] = {}
        self._places: dict[int, Place] = {}
        self._rows: dict[int, int] = {}
        """Rows in the lengths that were sent, negative where these were finer than octaves."""

    def lines(self, number: int, said: Iterable[Said], *, fine: bool) -> list[bytes]:
        """Lines that answer question `number`, or none for 0; fine: with lengths as exact as they are."""
        found: list[bytes] = []
        rows: list[str] = []
        size = 0
        for one in said:
            rows.append(json.dumps(self._row(one, fine or one.reading.final), separators=(",", ":")))
            size += len(rows[-1])
            if size > _LINE:
                found.append(_rows(number, rows))
                rows, size = [], 0
        if rows:
            found.append(_rows(number, rows))
        return found

    def _row(self, said: Said, fine: bool) -> list[Any]:
        reading = said.reading
        rank, lengths = reading.rank, reading.lengths
        row: list[Any] = [rank, said.serial, reading.step, reading.micro_batches]
        row += [reading.computed, reading.valid, reading.trained, reading.skipped, reading.routed]
        row += [round(1e6 * reading.seconds[phase]) for phase in PHASES]
        more: dict[str, Any] = {}
        if reading.final:
            more["final"] = 1
        if reading.by_source != self._sources.get(rank, {}):
            more["sources"] = self._sources[rank] = dict(reading.by_source)
        if reading.place != self._places.get(rank, _NOTHING.place):
            place = self._places[rank] = reading.place
            more["place"] = [int(place.replica), place.sequence, place.fingerprint]
        rows, before = lengths.rows, self._rows.get(rank, 0)
        # Fewer rows than before: they have turned out to be unknown.
        if fine or before < 0 or rows < before or rows - before > _GROWTH * before:
            self._rows[rank] = -rows if fine else rows
            more["lengths"] = flat = [lengths.width, lengths.full]
            for length, bucket in lengths.buckets.items():
                flat += (length, *bucket)
        return [*row, more] if more else row


class Decoder:
    """The other side."""

    def __init__(self) -> None:
        self._read: dict[int, Reading] = {}

    def said(self, row: Any) -> Said:
        """Raises KeyError, TypeError or ValueError where it is not what an `Encoder` gives."""
        more: Mapping[str, Any] = {}
        if len(row) == _NUMBERS + 1:
            more = row.pop()
            if not more.keys() <= {"final", "sources", "place", "lengths"}:
                raise ValueError(f"a reading has parts that are not known: {', '.join(more):.80}")
        if len(row) != _NUMBERS or not set(map(type, row)) <= _WHOLE:
            raise ValueError("a reading is not made of the numbers that it should be")
        rank, serial, step, micro_batches, computed, valid, trained, skipped, routed, *spent = row
        if None in (rank, serial, step, micro_batches) or None in spent:
            raise ValueError("a reading lacks a number that is always known")
        before = self._read.get(rank, _NOTHING)
        by_source, place, lengths = before.by_source, before.place, before.lengths
        if more:
            by_source = _sources_of(more["sources"]) if "sources" in more else by_source
            place = _place_of(*more["place"]) if "place" in more else place
            lengths = _lengths_of(more["lengths"]) if "lengths" in more else lengths
        reading = Reading(
            rank,
            step,
            micro_batches,
            computed,
            valid,
            trained,
            dict(zip(PHASES, [micro / 1e6 for micro in spent], strict=True)),
            "final" in more,
            skipped,
            routed,
            by_source,
            lengths,
            place,
        )
        self._read[rank] = reading
        return Said(serial, reading)


_NOTHING = Reading(0, 0, 0, 0, 0, 0, {})


def _rows(number: int, rows: Sequence[str]) -> bytes:
    return f'{{"number":{number},"readings":[{",".join(rows)}]}}\n'.encode()


def _lengths_of(flat: Any) -> Lengths:
    if set(map(type, flat)) != {int} or len(flat) % 4 != 2:
        raise ValueError("lengths are not made of the numbers that they should be")
    numbers = iter(flat)
    width, full = next(numbers), next(numbers)
    fours = zip(numbers, numbers, numbers, numbers, strict=True)
    return Lengths({length: (rows, fed, text) for length, rows, fed, text in fours}, width, full)


def _sources_of(payload: Mapping[str, Any]) -> dict[str, tuple[int | None, int | None]]:
    return {str(name): (_count(computed), _count(valid)) for name, (computed, valid) in payload.items()}


def _place_of(replica: Any, sequence: Any, fingerprint: Any) -> Place:
    printed = None if fingerprint is None else (int(fingerprint[0]), int(fingerprint[1]))
    return Place(bool(replica), tuple(map(int, sequence)), printed)


def _count(value: Any) -> int | None:
    return None if value is None else int(value)
