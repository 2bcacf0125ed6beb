"""The phase clock, driven by a clock of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
import time

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
    assert process_started(now=5.0) == 5.0
