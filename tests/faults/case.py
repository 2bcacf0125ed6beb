"""One case: lives a scenario through with real processes, syncs, and hands over what there was to be seen."""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import journal_text
from tests.faults.bench import Bench
from tests.faults.lived import Lived, deeds_of, state_to_resume_from
from tests.faults.ports import free_ports
from tests.faults.processes import Event, Overdue, Process
from tests.faults.proxy import Behaviour, Proxy, Window
from tests.faults.scenario import CLOSING, DISK, SERVER, Fault, Lifetime, Scenario

#: Seconds that a process may live, and that one waits for others at a gate.
_LONGEST_LIFE, _LONGEST_WAIT = 90.0, 4.0
#: Seconds between the launcher's SIGTERM and its SIGKILL.
_GRACE = 30.0
#: Seconds within which a snapshot that is due is in the journal: MLflow may be asked for the past first.
_SETTLED = 15.0


@dataclass
class Outcome:
    """What a case left: lifetimes as they were lived, and where to look for what they logged."""

    scenario: Scenario
    folder: Path
    journal: Path
    server: str
    experiment: str
    given_run: str | None
    lived: list[Lived] = field(default_factory=list)
    ever_written: list[list[journal_text.Line]] = field(default_factory=list)
    """The records of a journal before it was damaged, each time that one was."""
    whole: list[Path] = field(default_factory=list)
    """Copies of these journals."""
    journal_lost: bool = False
    injected: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Case:
    """Runs one scenario in a folder of its own."""

    def __init__(self, scenario: Scenario, bench: Bench, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._scenario, self._bench, self._folder = scenario, bench, folder
        self._proxy = Proxy(bench.proxies, bench.server)
        experiment = bench.client.create_experiment(f"{folder.name}-{time.time_ns()}")
        given = None
        if scenario.run_mode == "given":
            given = bench.client.create_run(experiment).info.run_id
        self._environ = {
            "MLFLOW_TRACKING_URI": self._proxy.address,
            "MLFLOW_EXPERIMENT_ID": experiment,
            **({"MLFLOW_RUN_ID": given} if given else {}),
        }
        if scenario.run_mode == "script":
            # What the script itself asks of a server that is away would take it minutes.
            self._environ |= {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "3"}
        self.outcome = Outcome(scenario, folder, folder / "journal", bench.server, experiment, given)
        self._numbers = random.Random(f"case {scenario.seed}")
        self._jobs = 0

    def run(self) -> Outcome:
        """Live through all of it, then sync twice."""
        try:
            for number, life in enumerate(self._scenario.lifetimes):
                self._live(life)
                if number < len(self._scenario.lifetimes) - 1:
                    self._between(life)
            self._proxy.set("pass")
            self._sync_at_last()
        except Overdue as error:
            self.outcome.problems.append(str(error))
        finally:
            self.outcome.requests.update(self._proxy.seen.by_behaviour)
            self._proxy.close()
        return self.outcome

    # ---- a lifetime ---------------------------------------------------------------------------------

    def _live(self, life: Lifetime) -> None:
        lived = Lived(life, time.monotonic(), *state_to_resume_from(self.outcome.lived))
        stays = any(fault.detail.get("stays") for fault in self._previous_faults())
        if not stays or self._scenario.run_mode == "script":  # which could not start its run
            self._proxy.set("pass")
        for fault in life.faults:
            if fault.kind in SERVER and fault.at == 0:
                self._begin(fault)
        hit_before = self._proxy.seen.by_behaviour.copy()
        ports = free_ports(self._scenario.ranks) if self._scenario.ranks > 1 else []
        for rank in reversed(range(self._scenario.ranks)):
            lived.processes.insert(0, self._start(lived, rank, ports))
        watched = self._watch_for_request(life, lived.processes[0])
        try:
            for event in lived.processes[0].follow(_LONGEST_LIFE):
                if event["event"] == "gate":
                    self._at_gate(event["name"], life, lived.processes[0])
                    lived.processes[0].let_go()
            self._end_others(lived)
        finally:
            if watched:
                self._proxy.forget_watches()
            # What the dead process asked for is done, late or not, before anybody comes after it.
            self._proxy.wait(lambda seen: seen.under_way == 0, _LONGEST_WAIT)
            lived.ended = time.monotonic()
            self.outcome.lived.append(lived)
            self._count(lived, hit_before)

    def _previous_faults(self) -> tuple[Fault, ...]:
        return self.outcome.lived[-1].life.faults if self.outcome.lived else ()

    def _start(self, lived: Lived, rank: int, ports: list[int]) -> Process:
        scenario, life = self._scenario, lived.life
        environ = dict(self._environ)
        if lived.state is not None and scenario.run_mode == "script" and lived.state["run"]:
            environ["MLFLOW_RUN_ID"] = lived.state["run"]
        # What a scheduler says: one allocation for all lifetimes, or one for each.
        number = 0 if scenario.held else len(self.outcome.lived)
        environ["MLFLOW_TOKENS_ALLOCATION"] = f"night {number}"
        if ports:
            environ |= {
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": str(len(ports)),
                "PADDLE_TRAINER_ENDPOINTS": ",".join(f"127.0.0.1:{port}" for port in ports),
                "PADDLE_MASTER": "127.0.0.1:1",
            }
        journal = self.outcome.journal
        for fault in life.faults:
            if fault.kind == "unwritable":
                journal = self._unwritable(fault)
        plan = {
            "seed": scenario.seed,
            "rank": rank,
            "first": lived.first,
            "steps": lived.first + life.steps,
            "every": scenario.every,
            "pace": scenario.pace,
            "trainer": scenario.trainer,
            "price": scenario.price,
            "journal": str(journal),
            "script_run": scenario.run_mode == "script",
            "block": scenario.block,
            "state": lived.state,
            "checkpoints": [lived.first + step for step in life.checkpoints],
            "deeds": deeds_of(life, rank, lived.first),
        }
        with_paddle = scenario.trainer == "paddle"
        return self._fork("tests.faults.job:main", {"plan": plan}, environ, f"rank-{rank}", with_paddle)

    def _fork(
        self,
        target: str,
        arguments: Mapping[str, Any],
        environ: Mapping[str, str],
        name: str,
        with_paddle: bool = False,
    ) -> Process:
        self._jobs += 1
        log = self._folder / f"{self._jobs:02d}-{name}.log"
        forks = self._bench.forks_with_paddle if with_paddle else self._bench.forks
        # Whether Paddle can be taken apart while our threads run is seen where it is used.
        return forks.start(target, arguments, environ, self._folder, log, whole_exit=with_paddle)

    def _unwritable(self, fault: Fault) -> Path:
        if fault.detail["how"] == "in /proc":
            return Path("/proc/mlflow_tokens")
        (self._folder / "file").write_text("a file, so nothing can lie under it")
        return self._folder / "file" / "journal"

    def _watch_for_request(self, life: Lifetime, process: Process) -> bool:
        if life.ending.kind != "kill_in_request":
            return False
        detail = life.ending.detail
        self._proxy.on_request(detail["path"], detail["number"], lambda: process.send(signal.SIGKILL))
        return True

    def _end_others(self, lived: Lived) -> None:
        """What the launcher does when rank 0 has ended: it waits for the others, or kills them too."""
        others = lived.processes[1:]
        if lived.processes[0].status:
            for process in others:
                process.send(signal.SIGTERM)
        for process in others:
            process.wait(_GRACE)

    # ---- at a gate ----------------------------------------------------------------------------------

    def _at_gate(self, name: str, life: Lifetime, process: Process) -> None:
        what, _, number = name.partition(" ")
        if what == "settle":
            self._settle(life, process)
            return
        if what == "ending":
            self._at_the_end(life, process)
            return
        fault = life.faults[int(number)]
        if what == "end":
            self._end(fault)
        elif fault.kind in SERVER:
            self._begin(fault)
        elif fault.kind == "second_job":
            self._second_job(life)
        else:
            self._sync("sync-meanwhile", self.outcome.journal)
            self.outcome.injected[fault.kind] += 1

    def _settle(self, life: Lifetime, process: Process) -> None:
        """Wait until the journal has a snapshot as new as the interval asks for."""
        steps = [event for event in process.events if event["event"] == "step"]
        every = self._scenario.every
        if len(steps) < every or any(fault.kind in DISK for fault in life.faults):
            return
        since, deadline = steps[-every]["before"], time.monotonic() + _SETTLED
        while not any(
            line["record"] == "quantities" and line["kind"] == "step" and line["t_mono"] >= since
            for path in journal_text.journals(self.outcome.journal)
            for line in journal_text.read(path)
        ):
            if time.monotonic() > deadline:
                self.outcome.problems.append(f"after {_SETTLED} s the journal has no snapshot of {steps[-1]}")
                return
            time.sleep(0.05)

    def _begin(self, fault: Fault) -> None:
        detail = fault.detail
        if detail["settle"] and fault.at:
            written = self._proxy.seen.answered["log-batch"]
            self._proxy.wait(lambda seen: seen.answered["log-batch"] > written, _LONGEST_WAIT)
        behaviour: Behaviour = "refuse" if fault.kind == "crash" else fault.kind  # type: ignore[assignment]
        delay = detail.get("delay", 0.0)
        if "path" in detail:
            window = Window(behaviour, detail["first"], detail["count"], detail["path"])
            self._proxy.set("pass", (window,), delay)
        else:
            self._proxy.set(behaviour, delay=delay)

    def _end(self, fault: Fault) -> None:
        """The server is well again, once somebody has met it unwell."""
        self._meet(fault)
        self._proxy.set("pass")

    def _meet(self, fault: Fault) -> None:
        if fault.kind not in ("refuse", "crash"):
            self._proxy.wait(lambda seen: seen.by_behaviour[fault.kind] > 0, _LONGEST_WAIT / 2)

    def _at_the_end(self, life: Lifetime, process: Process) -> None:
        """The training is over and the process is about to end."""
        ending = life.ending
        if ending.kind == "kill_in_request":
            # Lets the request come that it dies of; if none comes, the process ends by itself.
            process.let_go()
            return
        for fault in life.faults:
            if fault.kind in SERVER and fault.until is None:
                self._meet(fault)
        self._proxy.set(ending.detail["behaviour"], delay=1.0)
        process.let_go()
        self._proxy.wait(
            lambda seen: seen.held > 0 or seen.by_behaviour[ending.detail["behaviour"]] > 0, _LONGEST_WAIT
        )
        process.send(signal.SIGTERM)
        if ending.kind == "terminate_then_kill":
            self._proxy.wait(lambda seen: process.status is not None, 0.5)
            process.send(signal.SIGKILL)

    def _second_job(self, life: Lifetime) -> None:
        """Somebody starts the job a second time by mistake, on the same run and journal."""
        second = Lifetime(8, (4,), (), Fault("return", CLOSING))
        lived = Lived(second, time.monotonic(), None, 0, is_second=True)
        lived.processes = [self._start(lived, 0, [])]
        lived.processes[0].wait(_LONGEST_LIFE)
        lived.ended = time.monotonic()
        self.outcome.lived.append(lived)
        self.outcome.injected["second_job"] += 1
        said = lived.processes[0].log.read_text()
        if "is recorded in a run of its own" not in " ".join(said.split()):
            self.outcome.problems.append(f"the second job does not say that it has another run: {said}")

    # ---- between lifetimes, and at last -------------------------------------------------------------

    def _between(self, life: Lifetime) -> None:
        for fault in life.between:
            if self._damage(fault):
                self.outcome.injected[fault.kind] += 1
        if life.sync_between:
            self._proxy.set("pass")
            self._sync("sync-between", self.outcome.journal)

    def _damage(self, fault: Fault) -> bool:
        paths = journal_text.journals(self.outcome.journal)
        if not paths:
            return False
        path = max(paths, key=lambda path: path.stat().st_mtime_ns)
        self.outcome.ever_written.append(journal_text.read(path))
        whole = self._folder / f"whole-{len(self.outcome.whole)}.jsonl"
        self.outcome.whole.append(shutil.copyfile(path, whole))
        numbers = random.Random(fault.detail["draw"])
        if fault.kind == "corrupt":
            return journal_text.corrupt(path, numbers, fault.detail["count"])
        if fault.kind == "torn":
            return journal_text.tear(path, numbers)
        lost = self._folder / "lost"
        lost.mkdir(exist_ok=True)
        path.rename(lost / path.name)
        self.outcome.journal_lost = True
        return True

    def _sync_at_last(self) -> None:
        """Sync until everything is there, then once more, which must change nothing."""
        directory, how = self.outcome.journal, self._scenario.sync
        if not directory.is_dir():
            return
        address: list[str] = []
        if how == "from a copy":
            directory = self._folder / "copy"
            shutil.copytree(self.outcome.journal, directory)
        elif how == "to another address":
            address = ["--tracking-uri", self._bench.server]
        for name in ("sync-1", "sync-2"):
            self._must_work(name, self._sync(name, directory, *address), again=name == "sync-2")
        if how == "from a copy":
            self._must_work("sync-3", self._sync("sync-3", self.outcome.journal), again=True)

    def _must_work(self, name: str, process: Process, *, again: bool) -> None:
        """A sync worked; one that is not the first wrote nothing."""
        said = process.log.read_text()
        if process.status:
            self.outcome.problems.append(f"{name} ended with {process.status}: {said[-1500:]}")
        written = [int(number) for number in re.findall(r"(\d+)\s+points\s+written", said)]
        if again and any(written):
            self.outcome.problems.append(f"{name} wrote {written} points again")

    def _sync(self, name: str, directory: Path, *more: str) -> Process:
        arguments = ["sync", str(directory), *more]
        environ = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
        process = self._fork("tests.faults.command:main", {"arguments": arguments}, environ, name)
        process.wait(_LONGEST_LIFE)
        return process

    # ---- what took effect ---------------------------------------------------------------------------

    def _count(self, lived: Lived, before: Counter[str]) -> None:
        """Count the faults that came to pass, not those that were planned."""
        seen, injected = self._proxy.seen.by_behaviour, self.outcome.injected
        did = Counter(event["what"] for event in lived.events(0, "did"))
        for fault in lived.life.faults:
            behaviour = "refuse" if fault.kind == "crash" else fault.kind
            happened = (
                seen[behaviour] > before[behaviour]
                or (fault.kind == "refuse" and fault.at == 0)
                or (fault.kind.startswith("clock") and did["clock"])
                or (fault.kind.startswith("disk") and did["disk"])
                or fault.kind == "unwritable"
            )
            injected[fault.kind] += bool(happened)
        if lived.ended_as_planned() and lived.life.ending.kind not in ("return", "sys_exit"):
            injected[lived.life.ending.kind] += 1


def events_of(lived: Lived) -> list[list[Event]]:
    """Of every rank, for the report."""
    return [process.events for process in lived.processes]
