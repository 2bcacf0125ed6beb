"""Records on disk: what goes in comes out, and damage costs only what was damaged."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from mlflow_tokens.journal import Journal, read_journal
from mlflow_tokens.pricing import Price
from mlflow_tokens.records import PriceSet, Record, RunBound, SegmentEnd, decode, encode
from tests.journals import quantities, segment

EVERYTHING: list[Record] = [
    segment("a", (8, 8)),
    RunBound("0123", "http://host:5000"),
    PriceSet(
        1.5, Price(Decimal("1.10"), "CNY", "instance-hour", 8, "spot", "报价单", datetime.date(2026, 11, 30))
    ),
    quantities(train=1.25, eval=0.5, computed=10_251_184_259, valid=2**60, by_source={"wiki": {"valid": 3}}),
    SegmentEnd("a", 9.5, "KILLED"),
]


def write(path: Path, records: list[Record]) -> None:
    journal = Journal(path)
    for record in records:
        journal.append(record)
    journal.close()


def test_a_journal_that_was_renamed_meanwhile_is_not_made_anew(tmp_path: Path) -> None:
    """An empty one beside it would be found in its place by the next resume."""
    with pytest.raises(FileNotFoundError):
        Journal(tmp_path / "segment.jsonl", create=False)
    assert list(tmp_path.iterdir()) == []


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "run.jsonl", EVERYTHING)
    assert list(read_journal(tmp_path / "deep" / "run.jsonl")) == EVERYTHING


LAST = quantities(seq=7, train=3.0, computed=9)


@pytest.mark.parametrize("cut", range(2, 60, 7))
def test_a_line_that_was_cut_off_is_left_out_and_the_next_one_is_not_glued_to_it(
    tmp_path: Path, cut: int
) -> None:
    path = tmp_path / "run.jsonl"
    write(path, [*EVERYTHING, LAST])
    os.truncate(path, path.stat().st_size - cut)
    assert list(read_journal(path)) == EVERYTHING
    write(path, [SegmentEnd("a", 10.0, "FAILED")])
    assert list(read_journal(path)) == [*EVERYTHING, SegmentEnd("a", 10.0, "FAILED")]


def test_one_damaged_byte_costs_quantities_of_one_moment_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, [*EVERYTHING, LAST])
    lines = path.read_bytes().split(b"\n")[:-1]
    assert len(lines) == 2 * len(EVERYTHING)  # 2 quantities once, 4 other records twice
    for number, line in enumerate(lines):
        damaged = line[:20] + bytes([line[20] ^ 1]) + line[21:]
        path.write_bytes(b"\n".join([*lines[:number], damaged, *lines[number + 1 :], b""]))
        expected = [*EVERYTHING, LAST]
        if b'"quantities"' in line:
            expected.remove(LAST if number == len(lines) - 1 else EVERYTHING[3])
        assert list(read_journal(path)) == expected


def test_records_of_another_schema_are_refused_not_guessed() -> None:
    for change in ({"schema": 2}, {"record": "surprise"}, {"new_field": 1}, {"t_wall": None, "status": None}):
        payload = encode(SegmentEnd("a", 9.5, "KILLED")) | change
        if "status" in change:
            del payload["status"]
        with pytest.raises(ValueError, match="journal"):
            decode(payload)


def test_kill_9_loses_nothing_that_was_appended(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from mlflow_tokens.journal import Journal; from mlflow_tokens.records import SegmentEnd\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for number in range(100): journal.append(SegmentEnd(str(number), 0.0, 'FINISHED'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = tmp_path / "run.jsonl"
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [record.segment for record in read_journal(path)] == [str(number) for number in range(100)]  # type: ignore[union-attr]
