"""Jobs of four processes that are parallel in two ways: too long for `make test`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Stored
from tests.test_hybrid import check, launch_hybrid

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "arguments",
    [
        "--stock --dp 4",
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
