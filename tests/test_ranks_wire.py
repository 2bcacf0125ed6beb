"""A reading over the wire is the reading that was sent, in few bytes."""

from __future__ import annotations

import json
import time
from dataclasses import fields, replace
from typing import Any

import pytest

from mlflow_tokens.clock import PHASES
from mlflow_tokens.lengths import Lengths
from mlflow_tokens.meter import Reading
from mlflow_tokens.ranks.wire import Decoder, Encoder, Said
from mlflow_tokens.topology import Place

LENGTHS = Lengths({0: (1, 4, 0), 512: (640, 327_680, 300_000)}, 512, 7)
FULL = Reading(
    rank=3,
    step=1000,
    micro_batches=4001,
    computed=10_251_184_259,
    valid=None,
    trained=9,
    seconds={phase: number + 0.123456 for number, phase in enumerate(PHASES)},
    final=True,
    skipped=5,
    routed=7,
    by_source={"wiki/zh": (10, None), "web": (3, 2)},
    lengths=LENGTHS,
    place=Place(True, (1, 3), (16, 2**70)),
)


def sent(encoder: Encoder, reading: Reading, *, fine: bool = False) -> bytes:
    (line,) = encoder.lines(9, [Said(1, reading)], fine=fine)
    return line


def received(decoder: Decoder, line: bytes) -> Reading:
    message = json.loads(line)
    assert message["number"] == 9
    ((serial, reading),) = [decoder.said(row) for row in message["readings"]]
    assert serial == 1
    return reading


def test_every_part_of_a_reading_arrives() -> None:
    plain = Reading(0, 0, 0, 0, 0, 0, dict.fromkeys(PHASES, 0.0))
    for field in fields(Reading):
        assert getattr(FULL, field.name) != getattr(plain, field.name), f"let {field.name} differ in FULL"
    assert received(Decoder(), sent(Encoder(), FULL)) == FULL


def test_what_has_not_changed_is_not_said_again_and_stays() -> None:
    encoder, decoder = Encoder(), Decoder()
    first = replace(FULL, final=False)
    long = sent(encoder, first)
    assert received(decoder, long) == first
    second = replace(first, step=1001, computed=None)
    short = sent(encoder, second)
    assert received(decoder, short) == second
    assert len(short) < len(long) - 100
    third = replace(second, by_source={"web": (4, 2)}, place=Place())
    assert received(decoder, sent(encoder, third)) == third


def test_lengths_are_said_again_once_they_have_grown_by_a_64th_or_are_to_be_exact() -> None:
    encoder, decoder = Encoder(), Decoder()

    def after(rows: int, *, fine: bool = False, final: bool = False) -> int:
        lengths = Lengths({8: (rows, 8 * rows, 8 * rows)}, 8, rows)
        return received(
            decoder, sent(encoder, replace(FULL, lengths=lengths, final=final), fine=fine)
        ).lengths.rows

    assert [after(640), after(650), after(651), after(660)] == [640, 640, 651, 651]
    assert after(652, fine=True) == 652  # a heartbeat's, and from here on by octaves again
    assert [after(653), after(654)] == [653, 653]
    assert after(655, final=True) == 655
    assert after(0) == 0  # they have become unknown


def test_a_reading_of_a_long_training_takes_a_hundred_bytes() -> None:
    encoder = Encoder()
    counts = dict.fromkeys(("computed", "valid", "trained"), 10**12 + 1)
    reading = replace(FULL, **counts, final=False, step=10**6, micro_batches=8 * 10**6)  # type: ignore[arg-type]
    sent(encoder, reading)
    assert len(sent(encoder, reading)) < 200
    usual = replace(reading, seconds={**dict.fromkeys(PHASES, 0.0), "train": 86_400.5, "startup": 20.25})
    sent(encoder, usual)
    assert len(sent(encoder, usual)) < 130


def test_many_readings_are_cut_into_lines_of_bounded_length() -> None:
    sources = {f"source {number} {'x' * 200}": (number, number) for number in range(100)}
    said = [Said(1, replace(FULL, rank=rank, by_source=sources)) for rank in range(1, 100)]
    lines = Encoder().lines(9, said, fine=True)
    assert len(lines) > 1
    assert max(map(len, lines)) < 300_000
    decoder = Decoder()
    assert [decoder.said(row) for line in lines for row in json.loads(line)["readings"]] == said


def test_no_clock_of_the_wall_is_in_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    today = sent(Encoder(), FULL)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 86_400)
    assert sent(Encoder(), FULL) == today


ROW = json.loads(sent(Encoder(), FULL))["readings"][0]


@pytest.mark.parametrize(
    "row",
    [
        None,
        7,
        {},
        [],
        ROW[:-2],
        [*ROW[:-1], 5, ROW[-1]],
        [None, *ROW[1:]],
        ["3", *ROW[1:]],
        [True, *ROW[1:]],
        [*ROW[:4], 1.5, *ROW[5:]],
        [*ROW[:9], None, *ROW[10:]],
        [*ROW[:-1], {"energy": 3}],
        [*ROW[:-1], []],
        [*ROW[:-1], {"lengths": [8, 1, 2]}],
        [*ROW[:-1], {"lengths": [8, 1, 2, 3, 4, "5"]}],
        [*ROW[:-1], {"sources": {"web": 3}}],
        [*ROW[:-1], {"place": [0]}],
    ],
)
def test_what_is_no_reading_is_not_read_as_one(row: Any) -> None:
    with pytest.raises((TypeError, ValueError, KeyError, AttributeError)):
        Decoder().said(row)
