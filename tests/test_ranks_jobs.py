"""Ranks in real processes on several nodes, which addresses of loopback stand for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.conftest import Stored
from tests.jobs import ROOT, SCRIPTS, recorded
from tests.ranks import endpoints, wait_until


class Rank:
    def __init__(self, number: int, all_of_them: list[str], *arguments: int, cwd: Path) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
        environ = {
            "PADDLE_TRAINER_ID": str(number),
            "PADDLE_TRAINERS_NUM": str(len(all_of_them)),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(all_of_them),
            "PADDLE_MASTER": "127.0.0.1:1",
            "PYTHONPATH": str(ROOT),
        }
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "by_hand.py"), *map(str, arguments)],
            env=inherited | environ,
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == word + "\n", self.process.communicate()[1]

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def ends(self) -> str:
        """What it said on stderr."""
        _, said = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, said
        return said


def computed(ranks: int, steps: int) -> int:
    return sum(1000 * (rank + 1) + step for rank in range(ranks) for step in range(1, steps + 1))


def test_three_nodes_of_which_ranks_have_another_clock_interval_and_number_of_steps(
    stored: Stored, tmp_path: Path
) -> None:
    """Rank 1's clock is a day late; rank 2, which relays, has an interval of 7; rank 4 has 5 steps more."""
    everyone, journals = endpoints(2, 3, 1), tmp_path / "journal"
    usual, odd = (23, 5, 0), {1: (23, 5, -86_400), 2: (23, 7, 86_400), 4: (28, 5, 0)}
    ranks = [Rank(number, everyone, *odd.get(number, usual), cwd=tmp_path) for number in range(6)]
    for word, snapshot in (("READY", 0), ("TRAINED", 20)):
        for rank in ranks:
            rank.until(word)
        # Rank 0 asks when it has loaded MLflow, for which the others would not wait at their end.
        wait_until(lambda last=snapshot: last in [0, *(each["step"] for each in recorded(journals))], 60.0)
        for rank in ranks:
            rank.go()
    said = [rank.ends() for rank in ranks]
    assert "WARNING" not in said[0]
    assert said[1:] == [""] * 5
    totals = {step: computed(6, step) for step in (5, 10, 15, 20)}
    totals[23] = computed(6, 23) + sum(5000 + step for step in range(24, 29))
    assert dict(stored.points("tokens/computed")) == totals
    assert dict(stored.points("tokens/valid")) == {
        step: tokens - 6 * step - (5 if step == 23 else 0) for step, tokens in totals.items()
    }
    records = recorded(journals)
    assert all(abs(record["t_wall"] - time.time()) < 600 for record in records)
    (phases,) = records[-1]["device_seconds"].values()
    held = sum(phases.values())
    assert 0 < held < 6 * 120
    assert {record["ranks_reporting"] for record in records} == {6}
