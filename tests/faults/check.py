"""What must hold after a case, whatever went wrong in it."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlflow.entities import Run

from mlflow_tokens.journal import read_journal
from mlflow_tokens.ledger import replay
from tests.faults import journal_text
from tests.faults.bench import Bench
from tests.faults.case import Outcome
from tests.faults.lived import Lived
from tests.faults.scenario import DISK, SERVER
from tests.faults.stored import Point, stored_points
from tests.faults.truth import KINDS, Follower, Known, Walk

#: What the price of all scenarios that have one costs an hour of a device.
PRICE = 2.0
#: Seconds within which a process that was told to end has ended, by the limits of its flush.
LONGEST_EXIT = 20.0
#: Seconds that no call of ours may take or, so that a busy machine is no fault of ours, stand still.
LONGEST_CALL, LONGEST_STANDSTILL = 2.0, 1.0

#: Endings after which a process has no time to say anything.
KILLING = ("kill", "kill_first", "kill_in_request", "terminate_then_kill", "os_exit")

#: Seconds that a snapshot takes to the journal at most, where MLflow need not be asked for the past.
TO_JOURNAL = 3.0
#: Seconds more where MLflow, or another rank, is asked first.
LONGEST_HISTORY = 12.0


@dataclass
class Verdict:
    """problems: in words, none if all is well. calls: seconds that each of our calls took."""

    problems: list[str] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    """Seconds that our calls of a step stood still, the longest of each step."""
    lost: list[int] = field(default_factory=list)
    """Steps that each process had finished and not recorded when it was killed without warning."""
    points: int = 0
    runs: int = 0


def check(outcome: Outcome, bench: Bench) -> Verdict:
    """Compare what is stored with what was journalled and what was trained."""
    return _Checker(outcome, bench).verdict()


def _points_of(path: Path) -> set[Point]:
    """All that is to be in the store because of a journal."""
    return {point for snapshot in replay(read_journal(path)) for point, _ in snapshot.points()}


class _Checker:
    def __init__(self, outcome: Outcome, bench: Bench) -> None:
        self._outcome, self._bench = outcome, bench
        self._verdict = Verdict(list(outcome.problems))
        scenario = outcome.scenario
        self._price = PRICE if scenario.price else None
        self._damaged = any(life.between for life in scenario.lifetimes)
        faults = [fault.kind for life in scenario.lifetimes for fault in life.faults]
        self._clock_moved = bool({*faults} & {"clock_back", "clock_forward"})
        self._disk_failed = bool({*faults} & {*DISK})
        self._journal_incomplete = "unwritable" in faults or "disk_full_for_good" in faults

    def verdict(self) -> Verdict:
        for lived in self._outcome.lived:
            self._check_training(lived)
            self._check_exit(lived)
        walks = self._walks()
        for lived in self._outcome.lived:
            self._check_recorded(lived, [walk for walk, _ in walks])
        runs = self._bench.client.search_runs([self._outcome.experiment], max_results=100)
        self._verdict.runs = len(runs)
        for run in runs:
            walk = next((walk for walk in walks if walk[0].run == run.info.run_id), None)
            if walk is not None:
                self._check_run(run, *walk)
            elif self._journal_incomplete or self._outcome.journal_lost or self._killed_on_a_full_disk():
                self._check_by_ledger(run, {})
            elif not self._points(run) and self._abandoned_by_script():
                continue
            elif self._points(run) or self._any_snapshot():
                self._problem(f"run {run.info.run_id} ({run.info.status}) has no journal")
            self._check_status(run, walk is not None, walks)
            if self._journal_incomplete and self._reachable_at_end() and len(runs) == 1:
                self._check_end(run)
        for walk_here, _ in walks:
            if walk_here.known and walk_here.run not in {run.info.run_id for run in runs}:
                self._problem(f"the run {walk_here.run} of a journal is not in the store")
        return self._verdict

    # ---- the processes --------------------------------------------------------------------------------

    def _check_training(self, lived: Lived) -> None:
        """Nothing came out of our calls, none of them stood still, and training went as far as it should."""
        for process in lived.processes:
            for event in process.events:
                self._verdict.calls += event.get("took", ())
                self._verdict.blocked += [event["blocked"]] if "blocked" in event else []
                if event["event"] in ("raised", "survived"):
                    self._problem(f"a process {event['event']}: {event}")
                if max(event.get("took", (0.0,)), default=0.0) >= LONGEST_CALL and (
                    event["blocked"] >= LONGEST_STANDSTILL
                ):
                    self._problem(f"training stood still for us: {event}")
        ending, first = lived.life.ending, lived.first
        planned = lived.life.steps if ending.at <= 0 else ending.at
        if ending.kind in ("kill_in_request", "kill_other"):
            planned = 0
        last = planned - (ending.detail.get("when") == "counted")
        if lived.last_step() < first + last:
            self._problem(f"training reached step {lived.last_step()} instead of {first + last}")
        if not lived.ended_as_planned() and ending.kind not in (
            "kill_in_request",
            "terminate_then_kill",
            "terminate_in_flush",
        ):
            statuses = [process.status for process in lived.processes]
            self._problem(f"ending {ending} with exit statuses {statuses}")

    def _check_exit(self, lived: Lived) -> None:
        """The end did not wait longer for us than it may."""
        for process in lived.processes:
            told = [event["heard"] for event in process.events if event["event"] in ("closing", "signal")]
            took = process.events[-1]["heard"] - told[0] if told else 0.0
            if took > LONGEST_EXIT:
                self._problem(f"the end of a process took {took:.1f} s")

    # ---- the journals ---------------------------------------------------------------------------------

    def _walks(self) -> list[tuple[Walk, set[Point]]]:
        """Every journal, followed by hand, and the points that are to be in the store because of it."""
        found: list[tuple[Walk, set[Point]]] = []
        elsewhere = self._walks_before_damage()
        for path in self._in_order():
            walk = self._walk(journal_text.read(path), [*elsewhere, *(walk for walk, _ in found)])
            for problem in walk.problems:
                self._problem(f"{path.name}: {problem}")
            found.append((walk, _points_of(path) - self._since_damage(path)))
        return found

    def _since_damage(self, path: Path) -> set[Point]:
        """Points that follow only since a record before them is lost: the window of their rate is longer."""
        before = set().union(*map(_points_of, self._outcome.whole))
        times = {time for _, _, time in before}
        return {point for point in _points_of(path) - before if point[2] in times}

    def _walk(self, records: Sequence[journal_text.Line], elsewhere: Sequence[Walk]) -> Walk:
        lived, seed = self._outcome.lived, self._outcome.scenario.seed
        held = self._outcome.scenario.held
        whole = not (self._damaged or self._disk_failed)
        return Follower(lived, seed, self._price, held, elsewhere, whole=whole).follow(records)

    def _in_order(self) -> list[Path]:
        """Journals by their beginning: a later one may carry on from an earlier one."""

        def began(path: Path) -> float:
            return min((line["t_wall"] for line in journal_text.read(path) if "t_wall" in line), default=0.0)

        return sorted(journal_text.journals(self._outcome.journal), key=began)

    def _check_recorded(self, lived: Lived, walks: Sequence[Walk]) -> None:
        """A process that could say goodbye has recorded its last step, whatever else went wrong."""
        kinds = {fault.kind for fault in lived.life.faults}
        if kinds & {"unwritable", "disk_full_for_good"} or lived.life.between:
            return
        found = [(walk, known) for walk in walks for known in walk.known if known.lived is lived]
        recorded = found[-1][1].line["step"] - lived.numbers_from if found else 0
        missing = lived.last_step() - lived.first - recorded
        if lived.life.ending.kind in KILLING or lived.processes[0].status == -signal.SIGKILL:
            self._verdict.lost.append(missing)
            self._check_lost(lived, missing)
        elif missing > 0:
            self._problem(f"the last {missing} steps are not in the journal, after {lived.life.ending}")
        if lived.is_second and found and found[0][0].run == self._outcome.given_run:
            self._problem("a second job wrote into the run of the first")

    def _check_lost(self, lived: Lived, missing: int) -> None:
        """A process that is killed without a word loses less than two intervals' worth of steps.

        Those of its last seconds may be on their way to the journal still, unless they were waited for.
        """
        kinds = {fault.kind for fault in lived.life.faults}
        if kinds & set(DISK):
            return
        under_way = 0
        if not lived.life.ending.detail.get("settled"):
            resumed = lived.state is not None or lived.first > 0 or self._outcome.given_run is not None
            died = lived.processes[0].events[-1]["heard"]
            seconds = TO_JOURNAL + (LONGEST_HISTORY if resumed or len(lived.processes) > 1 else 0.0)
            under_way = sum(died - event["after"] < seconds for event in lived.events(0, "step"))
        if missing - under_way >= 2 * self._outcome.scenario.every:
            self._problem(f"{lived.life.ending} cost {missing} steps, {under_way} of them under way")

    # ---- the store ------------------------------------------------------------------------------------

    def _points(self, run: Run) -> dict[Point, list[float]]:
        return stored_points(self._bench.database, run.info.run_id)

    def _check_run(self, run: Run, walk: Walk, wanted: set[Point]) -> None:
        stored = self._points(run)
        self._verdict.points += len(stored)
        by_place = self._by_place(walk)
        for point, values in stored.items():
            # Where the clock went back and the last times were damaged, a time may be that of another record.
            if len(values) > 1 and not (self._damaged and self._clock_moved):
                self._problem(f"{point} is there {len(values)} times: {values}")
        missing = wanted - stored.keys()
        if missing:
            self._problem(f"{len(missing)} of {len(wanted)} points are not stored: {sorted(missing)[:4]}")
        unexplained: dict[Point, list[float]] = {}
        for (name, step, timestamp), values in stored.items():
            known = by_place.get((step, timestamp))
            if known is None:
                unexplained[(name, step, timestamp)] = values
            else:
                self._check_value(name, known, values[0], f"at step {step}")
        if unexplained:
            self._check_by_ledger(run, unexplained)
        self._check_latest(run, walk)

    def _by_place(self, walk: Walk) -> Mapping[tuple[int, int], Known]:
        """Records by step and time, those included that a damage has taken since they were written.

        While a run is below its high-water step, its points may stand at that step as well.
        """
        places: dict[tuple[int, int], Known] = {}
        for then in (*self._walks_before_damage(), walk):
            places |= {(known.high_water, known.timestamp): known for known in then.known}
        for then in (*self._walks_before_damage(), walk):
            places |= {(known.line["position"], known.timestamp): known for known in then.known}
        return places

    def _walks_before_damage(self) -> list[Walk]:
        walks: list[Walk] = []
        for records in self._outcome.ever_written:
            walks.append(self._walk(records, walks))
        return walks

    def _check_value(self, name: str, known: Known, value: float, where: str) -> None:
        expected = known.values()
        if name not in expected:
            if value < 0 or math.isinf(value):
                self._problem(f"{name} is {value} {where}")
            return
        right = expected[name]
        if math.isnan(value):
            if right is not None and not self._damaged and (known.sure or name != "tokens/effective"):
                self._problem(f"{name} is unknown {where}, by hand it is {right}")
        elif right is None or not math.isclose(value, right, rel_tol=1e-9):
            self._problem(f"{name} is {value} {where} of {known.line['kind']}, by hand it is {right}")

    def _check_latest(self, run: Run, walk: Walk) -> None:
        """The value that MLflow shows for the run is that of its end."""
        if not walk.known or self._journal_incomplete:
            return
        last = self._newest(run, walk)
        for name, right in last.values().items():
            if name == "device/gap_hours" and last.line["kind"] == "checkpoint":
                continue  # a checkpoint does not log it
            value = run.data.metrics.get(name)
            if value is not None:
                self._check_value(name, last, value, "as the latest value")
            elif right is not None and not self._damaged and (last.sure or name != "tokens/effective"):
                self._problem(f"{name} has no latest value, by hand it is {right}")

    def _newest(self, run: Run, walk: Walk) -> Known:
        """The last record of a run: a damage may have taken it from the journal, and not from the store."""
        before = [then for then in self._walks_before_damage() if then.run == run.info.run_id and then.known]
        return max((then.known[-1] for then in (*before, walk)), key=lambda known: known.line["t_mono"])

    # ---- runs whose journal does not have everything --------------------------------------------------

    def _check_by_ledger(self, run: Run, points: Mapping[Point, list[float]]) -> None:
        """Points that no journal explains: only where none could be kept, and with the ledger's values."""
        points = points or self._points(run)
        if not (self._journal_incomplete or self._outcome.journal_lost or self._killed_on_a_full_disk()):
            some = sorted(points)[:4]
            self._problem(f"{len(points)} stored points are in no journal: {some}")
            return
        seed = self._outcome.scenario.seed
        for (name, step, _), values in points.items():
            kind = name.removeprefix("tokens/")
            lived = self._outcome.lived
            if kind not in KINDS or len(lived) != 1:
                continue
            own = lived[0].trained(0, step, seed)
            if len(lived[0].processes) == 1 and (own is None or values[0] != getattr(own, kind)):
                self._problem(f"{name} is {values[0]} at step {step}, by hand it is {own}")

    def _killed_on_a_full_disk(self) -> bool:
        """What the disk had not taken when the process was killed may be in the store all the same."""
        lives = [lived.life for lived in self._outcome.lived]
        return any(
            life.ending.kind in KILLING and any(fault.kind in DISK for fault in life.faults) for life in lives
        )

    def _reachable_at_end(self) -> bool:
        """Whether the server was well when the job came to its end, which could say goodbye."""
        life = self._outcome.lived[-1].life
        if life.ending.kind in (*KILLING, "terminate_in_flush"):
            return False
        return all(fault.until is not None for fault in life.faults if fault.kind in SERVER)

    def _check_end(self, run: Run) -> None:
        """No journal could be kept, but the server was there: it has the totals of the last step."""
        (lived,) = (lived for lived in self._outcome.lived if not lived.is_second)
        if len(lived.processes) > 1:
            return
        trained = lived.trained(0, lived.last_step(), self._outcome.scenario.seed)
        for kind in KINDS:
            value, right = run.data.metrics.get(f"tokens/{kind}"), getattr(trained, kind)
            if value != right:
                self._problem(f"without a journal tokens/{kind} ends at {value}, by hand it is {right}")

    def _abandoned_by_script(self) -> bool:
        """Whether a script may have started a run and died before it trained."""
        lives = [lived.life.ending.kind for lived in self._outcome.lived]
        return self._outcome.scenario.run_mode == "script" and any(kind in KILLING for kind in lives)

    def _any_snapshot(self) -> bool:
        """Whether some process must have recorded something: it could say goodbye, or had time enough."""
        return any(
            lived.last_step() > lived.first and lived.life.ending.kind not in KILLING
            for lived in self._outcome.lived
        )

    def _check_status(self, run: Run, in_journal: bool, walks: Sequence[tuple[Walk, set[Point]]]) -> None:
        """The run has ended as its job did, where somebody is left who knows of it."""
        recorded = {id(known.lived) for walk, _ in walks for known in walk.known}
        status = run.info.status
        lived = [lived for lived in self._outcome.lived if not lived.is_second][-1]
        allowed = {
            "return": {"FINISHED"},
            "sys_exit": {"FINISHED"},
            "exception": {"FAILED"},
            "interrupt": {"KILLED"},
            "terminate": {"KILLED"},
            "terminate_all": {"KILLED"},
            "kill_other": {"FINISHED"},
        }.get(lived.life.ending.kind, {"FINISHED", "FAILED", "KILLED"})
        if len(self._outcome.lived) > 1 or self._journal_incomplete:
            allowed = {"FINISHED", "FAILED", "KILLED"}
        could_say = self._reachable_at_end() and lived.last_step() > lived.first
        lost = (self._outcome.journal_lost or self._killed_on_a_full_disk()) and not in_journal
        if lost or (id(lived) not in recorded and not could_say):
            allowed |= {"RUNNING"}
        by_script = self._outcome.scenario.run_mode == "script"
        if by_script and lived.life.ending.kind in ("interrupt", "sys_exit"):
            # The script ends its run itself, as MLflow's block does: any exception is a failure there.
            allowed |= {"FAILED"}
        if lived.events(0, "script_failed"):
            # The script's own run, whose end the script itself could not say.
            allowed |= {"RUNNING"}
        if status not in allowed:
            self._problem(f"the run is {status} after {lived.life.ending}")

    def _problem(self, what: str) -> None:
        self._verdict.problems.append(what)
