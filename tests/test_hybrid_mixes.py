"""Jobs of four processes that are parallel in two ways, and the corpus fed in every way that runs here.

Too long for `make test`. Four processes of stock Paddle miss each other in gloo about every third time: they
have the shim.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Stored
from tests.corpus import RECOUNT, ROWS
from tests.test_hybrid import check, launch_hybrid

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "arguments",
    [
        "--dp 4",
        "--dp 2 --mp 2 --recompute",
        "--dp 2 --pp 2 --accumulate 2",
        "--dp 2 --sharding 2 --accumulate 2",
        "--dp 2 --sep 2",
        "--sharding 2 --mp 2",
        "--sharding 2 --pp 2 --accumulate 3",
    ],
)
def test_four_processes(stored: Stored, tmp_path: Path, arguments: str) -> None:
    check(launch_hybrid(4, *arguments.split(), cwd=tmp_path), stored)


def check_corpus(stored: Stored) -> None:
    """Every row was counted once."""
    metrics = stored.metrics()
    assert {kind: metrics.get(f"tokens/{kind}") for kind in RECOUNT} == RECOUNT
    assert metrics["tokens/effective"] == RECOUNT["valid"]


@pytest.mark.parametrize(
    "arguments",
    [
        "--stock --dp 2",
        "--dp 4 --accumulate 2",
        "--stock --sharding 2 --accumulate 3",
        "--stock --sep 2 --recompute",
        "--mp 2 --accumulate 4 --recompute",
        "--pp 2 --accumulate 4",
        "--dp 2 --mp 2 --accumulate 2",
        "--dp 2 --pp 2 --accumulate 3",
        "--dp 2 --sep 2 --accumulate 2",
        "--sharding 2 --mp 2",
    ],
)
def test_the_corpus_in_every_parallelism(stored: Stored, tmp_path: Path, arguments: str) -> None:
    words = arguments.split()
    processes = 1
    for axis in ("--dp", "--sharding", "--sep", "--mp", "--pp"):
        processes *= int(words[words.index(axis) + 1]) if axis in words else 1
    done = launch_hybrid(processes, *words, "--corpus", "0", str(ROWS), cwd=tmp_path)
    assert done.status == 0, done.output
    check_corpus(stored)


def test_an_elastic_job_of_four_then_two_then_one(stored: Stored, tmp_path: Path) -> None:
    state = str(tmp_path / "state.json")
    parts = [("--dp 4", 4, (0, 16)), ("--mp 2", 2, (16, 32)), ("--stock", 1, (32, ROWS))]
    for number, (arguments, processes, (begin, end)) in enumerate(parts):
        folder = tmp_path / f"part-{number}"
        folder.mkdir()
        rows = ("--corpus", str(begin), str(end))
        done = launch_hybrid(processes, *arguments.split(), *rows, f"--state={state}", cwd=folder)
        assert done.status == 0, done.output
    check_corpus(stored)
