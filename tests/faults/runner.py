"""Runs scenarios side by side and judges them."""

from __future__ import annotations

import json
import math
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from tests.faults.bench import Bench
from tests.faults.case import Case, Outcome
from tests.faults.check import Verdict, check
from tests.faults.scenario import Scenario, scenario

#: Cases at a time. Most of a case is waiting, for a server that is away.
SIDE_BY_SIDE = 6


@dataclass
class Result:
    """injected: faults that came to pass, by kind. requests: by what the proxy did to them."""

    scenario: Scenario
    folder: Path
    seconds: float
    verdict: Verdict
    injected: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    processes: int = 0

    @property
    def passed(self) -> bool:
        return not self.verdict.problems

    def __str__(self) -> str:
        problems = "\n".join(f"  - {problem}" for problem in self.verdict.problems) or "  all is well"
        return (
            f"{self.scenario}\n{problems}\n"
            f"  kept in {self.folder}; again: python -m tests.faults --seed {self.scenario.seed}"
        )


def run_case(seed: int, bench: Bench) -> Result:
    """One case; its folder stays if something is wrong."""
    drawn, began = scenario(seed), time.monotonic()
    case = Case(drawn, bench, bench.folder / f"case-{seed}")
    outcome = case.outcome
    try:
        case.run()
        verdict = check(outcome, bench)
    except Exception:
        verdict = Verdict([*outcome.problems, traceback.format_exc()])
    seconds = time.monotonic() - began
    processes = [process for lived in outcome.lived for process in lived.processes]
    result = Result(
        scenario=drawn,
        folder=outcome.folder,
        seconds=seconds,
        verdict=verdict,
        injected=+outcome.injected,
        requests=+outcome.requests,
        steps=sum(event["event"] == "step" for process in processes for event in process.events),
        processes=len(processes),
    )
    if result.passed:
        shutil.rmtree(outcome.folder)
    else:
        _keep(result, outcome)
    return result


def _keep(result: Result, outcome: Outcome) -> None:
    """Write down what the processes said."""
    (outcome.folder / "problems.txt").write_text(str(result))
    for lived in outcome.lived:
        for process in lived.processes:
            lines = [json.dumps(event) + "\n" for event in process.events]
            (outcome.folder / f"events-{process.job}.jsonl").write_text("".join(lines))


def run_cases(first_seed: int, faults: int, bench: Bench, seconds: float = math.inf) -> Iterator[Result]:
    """Cases from a seed on, until so many faults have been injected, or so much time has gone by."""
    injected, seeds = 0, count(first_seed)
    last = time.monotonic() + seconds
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        running: set[Future[Result]] = set()
        while (injected < faults and time.monotonic() < last) or running:
            while injected < faults and len(running) < SIDE_BY_SIDE and time.monotonic() < last:
                running.add(pool.submit(run_case, next(seeds), bench))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                result = future.result()
                injected += result.injected.total()
                yield result
