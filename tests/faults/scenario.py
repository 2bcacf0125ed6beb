"""What happens in a case: drawn from its seed, and from nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

#: A moment of a lifetime that is no step: training is over and the process is about to end.
CLOSING = -1

Resume = Literal["checkpoint", "continue"]
RunMode = Literal["own", "given", "script"]


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, at a step of a lifetime (0: before its process starts).

    until: the step at which it is over; None: it never is, while the job lives.
    """

    kind: str
    at: int
    until: int | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        where = "closing" if self.at == CLOSING else f"step {self.at}"
        until = "" if self.until is None else f" to {self.until}"
        detail = "".join(f", {name}={value}" for name, value in self.detail.items())
        return f"{self.kind} ({where}{until}{detail})"


@dataclass(frozen=True)
class Lifetime:
    """One process (or one per rank) of the job.

    ending: how rank 0 ends. between: what befalls the journal after it. resume: how the next lifetime finds
    the run, if there is a next one: from the last checkpoint, or in the same run from where it stood.
    """

    steps: int
    checkpoints: tuple[int, ...]
    faults: tuple[Fault, ...]
    ending: Fault
    between: tuple[Fault, ...] = ()
    resume: Resume = "checkpoint"
    older: bool = False
    """Resume from the checkpoint before the newest one."""
    sync_between: bool = False


@dataclass(frozen=True)
class Scenario:
    """A case. run_mode: the run is started by us, given by $MLFLOW_RUN_ID, or started by the script."""

    seed: int
    ranks: int
    every: int
    pace: float
    trainer: Literal["numpy", "paddle"]
    run_mode: RunMode
    block: bool
    price: str | None
    lifetimes: tuple[Lifetime, ...]
    sync: Literal["in place", "from a copy", "to another address"]
    held: bool = False
    """The machines are held from one lifetime to the next, so the time between is billed."""

    def __str__(self) -> str:
        head = (
            f"seed {self.seed}: {self.ranks} rank(s), snapshot every {self.every}, {self.trainer}, "
            f"run {self.run_mode}, {'with block' if self.block else 'no block'}, pace {self.pace}, "
            f"price {self.price}, sync {self.sync}{', machines held' if self.held else ''}"
        )
        lines = [head]
        for number, life in enumerate(self.lifetimes, start=1):
            lines.append(f"  lifetime {number}: {life.steps} steps, checkpoints {life.checkpoints}")
            lines += [f"    {fault}" for fault in (*life.faults, life.ending, *life.between)]
            lines.append(f"    then {life.resume}{', after a sync' if life.sync_between else ''}")
        return "\n".join(lines)


#: Kinds of fault by what they befall. Their order decides which seed has which for its first.
SERVER = (
    "refuse", "hang", "late", "slow", "http500", "http503", "http429", "html",
    "cut_before", "cut_after", "cut_within", "crash",
)  # fmt: skip
DISK = ("disk_full", "disk_full_for_good", "unwritable")
CLOCK = ("clock_forward", "clock_back")
JOURNAL = ("corrupt", "torn", "lost")
ENDINGS = (
    "kill", "terminate", "kill_in_request", "terminate_in_flush", "terminate_then_kill", "os_exit",
    "exception", "interrupt",
)  # fmt: skip
RANKS = ("kill_other", "kill_first", "terminate_all")
MEETINGS = ("second_job", "sync_meanwhile")
KINDS = (*SERVER, *DISK, *CLOCK, *JOURNAL, *ENDINGS, *RANKS, *MEETINGS)

#: Requests that a fault may be for: any, or some that a run of this kind makes when it begins.
PATHS: Mapping[RunMode, tuple[str, ...]] = {
    "own": ("", "", "runs/log-batch", "runs/create", "runs/update"),
    "given": ("", "", "runs/log-batch", "runs/get", "runs/update"),
    "script": ("", "runs/log-batch"),
}
LATER_PATHS = ("", "", "runs/log-batch", "runs/update")


def scenario(seed: int) -> Scenario:
    """The scenario of a seed: its first fault goes around all kinds, the others are drawn."""
    return _Draw(seed).scenario()


class _Draw:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numbers = random.Random(f"scenario {seed}")
        self._kind = KINDS[seed % len(KINDS)]

    def scenario(self) -> Scenario:
        n, kind = self._numbers, self._kind
        ranks = n.choice((2, 2, 3)) if kind in RANKS else n.choices((1, 2), (9, 1))[0]
        mode: RunMode = n.choices(("own", "given", "script"), (5, 3, 2))[0]
        if kind == "second_job":
            mode = "given"
        count = n.choices((1, 2, 3), (4, 4, 2))[0]
        if kind in JOURNAL:
            count = max(2, count)
        if kind in DISK[1:]:
            # A job whose journal is gone for good leaves nothing that another lifetime could continue.
            count = 1
        lifetimes = tuple(self._lifetime(number, count, ranks, mode) for number in range(count))
        return Scenario(
            seed=self._seed,
            ranks=ranks,
            every=n.choice((1, 2, 3, 5) if kind != "second_job" else (1, 2, 3)),
            pace=n.choice((0.0, 0.002, 0.005)) if ranks == 1 else 0.005,
            trainer="paddle" if n.random() < 0.3 else "numpy",
            run_mode=mode,
            block=n.random() < 0.6,
            price=n.choices(("2.0 USD/device-hour", None), (9, 1))[0],
            lifetimes=lifetimes,
            sync=n.choices(("in place", "from a copy", "to another address"), (6, 2, 2))[0],
            held=n.random() < 0.5,
        )

    def _lifetime(self, number: int, count: int, ranks: int, mode: RunMode) -> Lifetime:
        n = self._numbers
        first, last = number == 0, number == count - 1
        kind = self._kind if first else ""
        planned = n.randint(6, 40)
        ending = self._ending(kind, planned, ranks, last)
        if kind == "second_job" and ending.kind == "kill_in_request":
            # The first job has to live while there is a second one.
            ending = Fault("return", CLOSING)
        # What comes after the end never happens.
        steps = ending.at if ending.at > 0 else planned
        faults: list[Fault] = []
        if kind in SERVER or n.random() < (0.5 if not first else 0.3):
            faults.append(self._server(kind if kind in SERVER else n.choice(SERVER), steps, mode, ending))
        if kind in CLOCK or n.random() < 0.15:
            faults.append(self._clock(kind if kind in CLOCK else n.choice(CLOCK), steps))
        if kind in DISK or n.random() < 0.1:
            faults.append(self._disk(kind if kind in DISK else "disk_full", steps))
        if kind in MEETINGS or (n.random() < 0.1 and ranks == 1):
            meeting = kind if kind in MEETINGS else "sync_meanwhile"
            # The first of two jobs has the run from its first snapshot on.
            faults.append(Fault(meeting, n.randint(3 if meeting == "second_job" else 1, steps)))
        between: list[Fault] = []
        if not last and (kind in JOURNAL or n.random() < 0.2):
            drawn = kind if kind in JOURNAL else n.choice(("corrupt", "torn"))
            between.append(Fault(drawn, CLOSING, detail={"draw": n.random(), "count": n.choice((1, 1, 2))}))
        return Lifetime(
            steps=planned,
            checkpoints=tuple(sorted(n.sample(range(1, steps + 1), min(steps, n.randint(1, 3))))),
            faults=tuple(faults),
            ending=ending,
            between=tuple(between),
            resume="continue" if mode == "given" and n.random() < 0.3 else "checkpoint",
            older=n.random() < 0.25,
            sync_between=not last and n.random() < 0.25,
        )

    def _server(self, kind: str, steps: int, mode: RunMode, ending: Fault) -> Fault:
        """A fault of the server: all that comes in a stretch of steps, or some requests from a step on."""
        n = self._numbers
        earliest = 1 if mode == "script" else 0
        later = n.randint(1, max(1, steps - 1))
        # A process that dies at a step does not come to its close.
        at = n.choice((earliest, earliest, later, CLOSING if ending.at <= 0 else later))
        detail: dict[str, Any] = {"settle": at != 0 and n.random() < 0.6}
        if kind == "slow":
            detail["delay"] = n.choice((0.1, 0.3, 1.0))
        if kind == "crash" or (kind != "refuse" and n.random() < 0.5):
            # A script's own run is there before the first fault.
            path = n.choice(PATHS[mode]) if at == 0 else n.choice(LATER_PATHS)
            # Of some requests there is one only, and few come at the end.
            many = path in ("", "runs/log-batch") and at != CLOSING
            first = n.choice((0, 0, 1, 2)) if many else 0
            detail |= {"first": first, "count": n.randint(1, 3), "path": path}
        until: int | None = None
        if 0 <= at < steps and (ending.at > 0 or ("path" not in detail and n.random() < 0.6)):
            until = n.randint(at + 1, steps)
        elif n.random() < 0.3:
            detail["stays"] = True
        return Fault(kind, at, until, detail)

    def _clock(self, kind: str, steps: int) -> Fault:
        seconds = self._numbers.choice((0.5, 30.0, 3600.0))
        return Fault(
            kind,
            self._numbers.randint(1, steps),
            detail={"shift": seconds if kind == "clock_forward" else -seconds},
        )

    def _disk(self, kind: str, steps: int) -> Fault:
        n = self._numbers
        if kind == "unwritable":
            return Fault(kind, 0, detail={"how": n.choice(("under a file", "in /proc"))})
        at = n.randint(0, steps - 2)
        until = n.randint(at + 1, steps) if kind == "disk_full" else None
        return Fault(kind, at, until, {"room": n.choice((0, 1, 40, 300, 700))})

    def _ending(self, kind: str, steps: int, ranks: int, last: bool) -> Fault:
        n = self._numbers
        if kind in (*ENDINGS, *RANKS):
            drawn = kind
        elif ranks > 1 and n.random() < 0.4:
            drawn = n.choice(RANKS)
        else:
            quietly = 0.6 if last else 0.25
            drawn = "return" if n.random() < quietly else n.choice((*ENDINGS, "kill", "sys_exit"))
        return self._make_ending(drawn, steps, ranks)

    def _make_ending(self, kind: str, steps: int, ranks: int) -> Fault:
        n = self._numbers
        late = n.randint(max(1, 2 * steps // 3), steps)
        makers: dict[str, Callable[[], Fault]] = {
            "return": lambda: Fault("return", CLOSING),
            "sys_exit": lambda: Fault("sys_exit", n.choice((CLOSING, late))),
            "kill_in_request": lambda: Fault(
                kind, 0, detail={"number": n.randint(0, 4), "path": n.choice(LATER_PATHS)}
            ),
            "terminate_in_flush": lambda: Fault(
                kind, CLOSING, detail={"behaviour": n.choice(("hang", "hang", "late", "http500"))}
            ),
            "terminate_then_kill": lambda: Fault(
                kind, CLOSING, detail={"behaviour": n.choice(("hang", "slow"))}
            ),
            "kill_other": lambda: Fault(kind, late, detail={"rank": n.randrange(1, max(2, ranks))}),
        }
        if kind in makers:
            return makers[kind]()
        # Settled: what was due has reached the journal. Otherwise the process dies whenever it does.
        settled = {"settled": n.random() < 0.5} if kind in ("kill", "kill_first", "os_exit") else {}
        return Fault(kind, late, detail={"when": n.choice(("after", "after", "counted")), **settled})
