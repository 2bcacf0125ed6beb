"""A journal followed record by record, beside what the ledgers kept by hand say to each of them.

It shares no code with the package: its own sums, its own idea of what a rollback takes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from tests.faults.batches import Counted
from tests.faults.journal_text import Line
from tests.faults.lived import Lived

KINDS = ("computed", "valid", "trained")
#: Seconds between the moment of which a process says the time and that at which it was.
CLOCKS_DIFFER = 0.1


@dataclass(frozen=True)
class Known:
    """What is true of the run at a record. None: nobody can know it any more.

    own: tokens of this lifetime alone. hours: device-hours held; gap_hours: between allocations. cost: in
    the currency of the price. sure: whether the effective tokens must be known; where the checkpoint's own
    record never reached the disk they may be, or be right.
    """

    line: Line
    lived: Lived
    own: Counted | None
    totals: Counted | None
    effective: int | None
    hours: float | None
    cost: float | None
    gap_hours: float
    high_water: int
    sure: bool = True

    @property
    def timestamp(self) -> int:
        milliseconds: int = round(self.line["t_wall"] * 1000)
        return milliseconds

    def values(self) -> dict[str, float | None]:
        """By metric; None where it is unknown."""
        totals = self.totals
        return {
            **{f"tokens/{kind}": None if totals is None else getattr(totals, kind) for kind in KINDS},
            "tokens/effective": self.effective,
            "device/hours": self.hours,
            "cost/total": self.cost,
            "device/gap_hours": self.gap_hours or None,
        }


@dataclass
class Walk:
    """Everything that the walk along one journal found.

    run: the run that the journal is of, as far as it says so. problems: what is wrong in the journal itself.
    """

    known: list[Known] = field(default_factory=list)
    run: str | None = None
    statuses: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def at(self, lived: Lived, step: int) -> Known | None:
        """The newest record of a step of a lifetime."""
        for known in reversed(self.known):
            if known.lived is lived and known.line["step"] == step:
                return known
        return None


def _with_late_answers(records: Sequence[Line]) -> list[Line]:
    """What MLflow said late of the time before the journal, in the place where it was asked."""
    lines: list[Line] = []
    asked: int | None = None
    for line in records:
        if line.get("late"):
            if line["record"] == "carried_over":
                assert asked is not None
                lines[asked] = line
            continue
        if line["record"] == "carried_over" and line["source"] == "unasked":
            asked = len(lines)
        lines.append(line)
    return lines


class Follower:
    """Follows one journal.

    elsewhere: walks along journals that this one may refer to. whole: nothing has befallen the journals, so
    that what is in one is all that was ever recorded.
    """

    def __init__(
        self,
        lived: Sequence[Lived],
        seed: int,
        price: float | None,
        held: bool,
        elsewhere: Sequence[Walk],
        *,
        whole: bool,
    ) -> None:
        self._lived, self._seed, self._elsewhere, self._whole = lived, seed, elsewhere, whole
        self._price, self._held = price, held
        self._gap_seconds: float | None = 0.0
        self._begun: set[str] = set()
        self._carried = False
        self._walk = Walk()
        self._segment = ""
        self._devices = 1
        self._lives_here: Lived | None = None
        self._before: Counted | None = Counted()
        self._effective_before: tuple[int | None, bool] = (0, True)
        self._seconds_before: float | None = 0.0
        self._past_step = 0
        self._high_water = 0

    def follow(self, records: Sequence[Line]) -> Walk:
        for line in _with_late_answers(records):
            name = line["record"]
            if name == "segment_start":
                self._devices = line["world_size"]
                self._begun.add(line["segment"])
            elif name == "run" and line["run"]:
                self._walk.run = line["run"]
            elif name == "segment_end":
                self._walk.statuses.append(line["status"])
            elif name == "carried_over":
                self._carry_over(line)
            elif name == "quantities":
                self._quantities(line)
        return self._walk

    # ---- where a segment begins ---------------------------------------------------------------------

    def _carry_over(self, line: Line) -> None:
        """Totals from elsewhere, in place of those here: they must be what the run had at some step."""
        self._carried = True
        if self._whole and self._walk.known:
            self._problem(
                line, f"({line['source']}) takes the place of {len(self._walk.known)} whole records"
            )
        if line["source"] in ("unknown", "unasked"):
            self._before = self._seconds_before = self._gap_seconds = None
            self._effective_before = (None, True)
            return
        carried = Counted(*(line["tokens"].get(kind, -1) for kind in KINDS))
        empty = line["late"] and carried == Counted() and not self._walk.known
        if not empty and not any(
            carried in self._ever_true(known) for walk in self._walks() for known in walk.known
        ):
            self._problem(line, f"carries over {carried}, which the run never had")
            self._before = None
            return
        self._before = carried
        self._effective_before = (line["tokens"].get("effective"), False)
        self._seconds_before = sum(
            seconds for phases in line["seconds"].values() for seconds in phases.values()
        )
        self._past_step = line["from_step"]
        self._high_water = line["high_water"]
        self._gap_seconds = line["gap_seconds"]

    def _walks(self) -> tuple[Walk, ...]:
        return (*self._elsewhere, self._walk)

    def _ever_true(self, known: Known) -> set[Counted]:
        """The run's totals at every step of a lifetime: MLflow may have had some that no disk took."""
        if known.totals is None or known.own is None:
            return set()
        lived, before = known.lived, known.totals - known.own
        if len(lived.processes) > 1:
            return {known.totals}
        steps = range(lived.first, lived.last_step() + 2)
        return {
            before + trained for step in steps if (trained := lived.trained(0, step, self._seed)) is not None
        }

    def _begin(self, line: Line, lived: Lived) -> None:
        """The first quantities of a segment."""
        self._segment = line["segment"]
        carried, self._carried = self._carried, False
        if self._walk.known and not carried:
            last = self._walk.known[-1]
            self._before, self._effective_before = last.totals, (last.effective, last.sure)
            self._seconds_before = None if last.hours is None else last.hours * 3600
            self._past_step = last.line["step"]
            self._between(last, line, lived)
        elif carried and lived.state is None and not self._walk.known:
            # Only MLflow has told of the past, while steps were being counted already.
            self._past_step = 0
        if lived.state is not None:
            self._past_step = lived.first
            self._effective_before = self._effective_at(lived.parent, lived.first)
        self._lives_here = lived
        lived.numbers_from = self._past_step

    def _effective_at(self, lived: Lived | None, step: int) -> tuple[int | None, bool]:
        """Effective tokens at a step of a lifetime, and whether a record of it was kept."""
        if step == 0:
            return 0, True
        assert lived is not None
        for walk in reversed(self._walks()):
            known = walk.at(lived, step)
            if known is not None:
                return known.effective, known.sure
        own = lived.trained(0, lived.first + step - lived.numbers_from, self._seed)
        if own is None or len(lived.processes) > 1 or (lived.state is None and lived.first):
            return None, False
        before, _ = (0, True) if lived.state is None else self._effective_at(lived.parent, lived.first)
        return None if before is None else before + own.valid, False

    # ---- quantities -----------------------------------------------------------------------------------

    def _quantities(self, line: Line) -> None:
        lived = self._whose(line)
        if lived is None:
            self._problem(line, "is of a time at which no process of this case lived")
            return
        if line["segment"] != self._segment:
            self._begin(line, lived)
        elif lived is not self._lives_here:
            self._problem(line, "is of a segment that another process began")
        own = self._own(line, lived)
        totals = None if own is None or self._before is None else self._before + own
        effective_before, sure = self._effective_before
        effective = None if own is None or effective_before is None else effective_before + own.valid
        complete = line["ranks_reporting"] == self._devices
        held = sum(seconds for phases in line["device_seconds"].values() for seconds in phases.values())
        hours = None
        if complete and self._seconds_before is not None:
            hours = (self._seconds_before + held) / 3600
        self._check_held(line, lived, held)
        self._check_clock(line, lived)
        self._high_water = max(self._high_water, line["position"])
        gap = None if self._gap_seconds is None else self._gap_seconds / 3600
        cost = None if hours is None or self._price is None else hours * self._price
        self._walk.known.append(
            Known(line, lived, own, totals, effective, hours, cost, gap, self._high_water, sure)
        )

    def _whose(self, line: Line) -> Lived | None:
        """The lifetime in which a record was written: the shortest one, where one lay within another."""
        here = self._lives_here
        if line["segment"] == self._segment and here is not None and here.holds(line["t_mono"]):
            return here
        before = {id(known.lived) for known in self._walk.known if known.line["segment"] != line["segment"]}
        fitting = [lived for lived in self._lived if lived.holds(line["t_mono"]) and id(lived) not in before]
        return min(fitting, key=lambda lived: lived.ended - lived.began, default=None)

    def _own(self, line: Line, lived: Lived) -> Counted | None:
        """What the segment had trained, which must be what the ledgers say."""
        step = lived.first + line["step"] - self._past_step
        tokens = line["tokens"]
        if any(kind not in tokens for kind in KINDS):
            if line["ranks_reporting"] == self._devices:
                self._problem(line, f"lacks tokens: {tokens}")
            return None
        own = Counted(*(tokens[kind] for kind in KINDS))
        first = lived.trained(0, step, self._seed)
        if first is None:
            self._problem(line, f"is of step {step}, which its process never reached ({lived.last_step()})")
            return None
        if own not in self._possible(first, step, lived):
            self._problem(line, f"has {own} at step {step}, by hand it is {first} on rank 0")
        return own

    def _possible(self, first: Counted, step: int, lived: Lived) -> set[Counted]:
        """What all ranks together may have: another rank counts with any step not after rank 0's."""
        others = [
            [
                trained
                for at in range(lived.first, lived.last_step(rank) + 2)
                if (trained := lived.trained(rank, at, self._seed)) is not None
            ]
            for rank in range(1, len(lived.processes))
        ]
        return {sum(parts, first) for parts in product(*others)}

    def _check_clock(self, line: Line, lived: Lived) -> None:
        """Rank 0's seconds lie between what its own clock said before and after the step."""
        begun = lived.events(0, "begun")
        index = line["step"] - self._past_step - 1
        steps = lived.events(0, "step")
        if not begun or not 0 <= index < len(steps):
            return
        least = steps[index]["before"] - begun[0]["born"] - CLOCKS_DIFFER
        most = steps[index]["after"] - begun[0]["forked"] + CLOCKS_DIFFER
        late = line["kind"] != "step"
        if line["elapsed"] < least or (line["elapsed"] > most and not late):
            self._problem(line, f"has {line['elapsed']} s, by hand it is {least:.3f} to {most:.3f}")

    def _check_held(self, line: Line, lived: Lived, held: float) -> None:
        """Device-seconds are those of rank 0 and, for every other rank, no more than it has lived."""
        others = [process for process in lived.processes[1:] if process.status is not None]
        most = line["elapsed"] + sum(
            process.events[-1]["heard"] - event["forked"]
            for process in others
            for event in process.events
            if event["event"] == "begun"
        )
        if not line["elapsed"] - 1e-4 <= held <= most + 1e-4 + CLOCKS_DIFFER * len(others):
            self._problem(line, f"holds {held} s of {line['elapsed']} s to {most:.3f} s")

    def _between(self, last: Known, line: Line, lived: Lived) -> None:
        """The time since the last record of the segment before: billed if devices were held."""
        begun, before = lived.events(0, "begun"), last.lived.events(0, "begun")
        gap = round(line["t_mono"] - line["elapsed"] - last.line["t_mono"], 6)
        if gap <= 0 or line["segment"] not in self._begun or last.line["segment"] not in self._begun:
            return
        if begun and before:
            least = begun[0]["forked"] - before[0]["born"] - last.line["elapsed"] - 3 * CLOCKS_DIFFER
            most = begun[0]["born"] - before[0]["forked"] - last.line["elapsed"] + 3 * CLOCKS_DIFFER
            if not least <= gap <= most:
                self._problem(line, f"follows after {gap} s, by hand it is {least:.3f} to {most:.3f}")
        if not self._held:
            if self._gap_seconds is not None:
                self._gap_seconds += gap * len(last.lived.processes)
        elif self._seconds_before is not None:
            self._seconds_before += gap * len(last.lived.processes)

    def _problem(self, line: Line, what: str) -> None:
        self._walk.problems.append(
            f"record {line.get('seq', '')} ({line['record']} {line.get('kind', '')}, "
            f"step {line.get('step')}) {what}"
        )
