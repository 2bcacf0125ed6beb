"""The phase clock, driven by a clock of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlflow_tokens.clock import PHASES, PhaseClock, process_started


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_second_goes_to_exactly_one_phase() -> None:
    time = Time()
    clock = PhaseClock(started=90.0, now=time)  # the process is 10 s old
    time.now = 105.0
    clock.switch("train")
    time.now = 115.0
    clock.mark()
    time.now = 175.0  # an evaluation batch comes 60 s after the step ended
    clock.reclassify("eval")
    time.now = 176.0
    clock.switch("train")
    time.now = 178.0
    assert clock.seconds() == dict.fromkeys(PHASES, 0.0) | {"startup": 15.0, "train": 12.0, "eval": 61.0}


def test_a_phase_shrinks_when_it_turns_out_to_be_another_but_the_sum_does_not() -> None:
    time = Time()
    clock = PhaseClock(now=time)
    clock.switch("train")
    time.now = 130.0
    assert clock.seconds()["train"] == 30.0
    clock.reclassify("eval")
    assert clock.seconds()["train"] == 0.0
    assert sum(clock.seconds().values()) == 30.0


def test_the_start_of_the_process_is_known() -> None:
    script = (
        "import time; t = time.monotonic(); time.sleep(0.3)\n"
        "from mlflow_tokens.clock import process_started\n"
        "print(t - process_started())"
    )
    began = time.monotonic()
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ
    )
    # Python takes milliseconds to reach the first line; the kernel counts in ticks of 10 ms.
    assert -0.02 <= float(out.stdout) < time.monotonic() - began


def test_an_interactive_session_starts_now(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    assert process_started() == 5.0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
def test_a_process_that_is_held_up_while_it_asks_is_not_older_for_it(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Two clocks are read one after the other, and a busy machine may take 0.3 s between the two."""
    ticks = int(Path("/proc/self/stat").read_text("ascii").rpartition(")")[2].split()[19])
    # The machine has slept for 1,000 s, which only one of the clocks has counted; the process is 50 s old.
    began = ticks / os.sysconf("SC_CLK_TCK") - 1000.0
    clock, stalls = Time(), [0.3, 0.0, 0.2]
    clock.now = began + 50.0

    def since_boot(which: int) -> float:
        assert which == time.CLOCK_BOOTTIME
        clock.now += stalls.pop(0) if stalls else 0.1
        return clock.now + 1000.0

    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(time, "clock_gettime", since_boot)
    assert process_started() == pytest.approx(began, abs=1e-6)
