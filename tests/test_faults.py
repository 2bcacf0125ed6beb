"""A quick selection of injected faults; `make faults` runs a thousand and more (see docs/faults.md)."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from tests.faults.bench import Bench, bench
from tests.faults.case import Case
from tests.faults.check import check
from tests.faults.journal_text import journals, read
from tests.faults.runner import SIDE_BY_SIDE, Result, run_case
from tests.faults.scenario import CLOSING, KINDS, Fault, Lifetime, Scenario

#: One case that begins with each kind of fault.
SEEDS = range(len(KINDS))
FAULTS = 60
_LONGEST = 240.0

Running = Mapping[int, "Future[Result]"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("faults"), empty_store) as made:
        yield made


@pytest.fixture(scope="module")
def running(made: Bench) -> Iterator[Running]:
    """All cases, side by side: most of a case is waiting.

    They are over before the first test is: pytest changes the environment between tests, which threads read.
    """
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        cases = {seed: pool.submit(run_case, seed, made) for seed in SEEDS}
        wait(cases.values(), _LONGEST)
        yield cases
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_number_survives(seed: int, running: Running) -> None:
    result = running[seed].result(_LONGEST)
    assert result.passed, f"\n{result}"


def test_enough_faults_were_injected(running: Running) -> None:
    injected: Counter[str] = Counter()
    for future in running.values():
        injected += future.result(_LONGEST).injected
    assert injected.total() >= FAULTS, dict(injected)
    assert not set(KINDS) - injected.keys(), f"never happened: {set(KINDS) - injected.keys()}"


def test_the_checks_are_not_blind(made: Bench, tmp_path: Path) -> None:
    """What must not happen is brought about by hand, and seen."""
    life = Lifetime(10, (), (), Fault("return", CLOSING))
    plain = Scenario(1, 1, 5, 0.0, "numpy", "given", True, "2.0 USD/device-hour", (life,), "in place")
    outcome = Case(plain, made, tmp_path / "case").run()
    assert not check(outcome, made).problems
    run, (journal,) = outcome.given_run, journals(outcome.journal)
    process = outcome.lived[0].processes[0]

    # The ledger kept by hand says something else.
    number = next(n for n, event in enumerate(process.events) if event.get("step") == 5)
    honest = process.events[number]
    process.events[number] = {**honest, "computed": honest["computed"] + 1}
    problems = "; ".join(check(outcome, made).problems)
    assert "at step 5, by hand it is" in problems
    process.events[number] = honest

    # A record whose points never arrived.
    written = journal.read_bytes()
    last = [line for line in read(journal) if line["record"] == "quantities"][-1]
    text = json.dumps({**last, "seq": last["seq"] + 1, "t_wall": last["t_wall"] + 0.001}).encode()
    journal.write_bytes(written + b"%08x %s\n" % (zlib.crc32(text), text))
    assert "points are not stored" in "; ".join(check(outcome, made).problems)
    journal.write_bytes(written)

    # A point twice, a point from nowhere, a wrong latest value, a run that goes on.
    (first,) = (p for p in made.client.get_metric_history(run, "tokens/valid") if p.step == 5)
    made.client.log_metric(run, "tokens/valid", first.value + 1, first.timestamp, 5)
    made.client.log_metric(run, "cost/total", 1.0, first.timestamp, 99)
    made.client.update_run(run, status="RUNNING")
    problems = "; ".join(check(outcome, made).problems)
    for seen in ("is there 2 times", "in no journal", "as the latest value", "the run is RUNNING"):
        assert seen in problems
