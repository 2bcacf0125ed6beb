"""A lifetime as it was lived: what its processes said, and what follows from that by hand."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.faults.batches import Counted, micro_batches, recount
from tests.faults.processes import Event, Process
from tests.faults.scenario import CLOCK, CLOSING, DISK, MEETINGS, SERVER, Fault, Lifetime

State = Mapping[str, Any]

#: Exit statuses by the way a process ends.
_STATUS: Mapping[str, tuple[int, ...]] = {
    "return": (0,),
    "sys_exit": (0,),
    "os_exit": (7,),
    "exception": (1,),
    # Python forgets that it was interrupted where an exit handler imports a module that uses exec().
    "interrupt": (-signal.SIGINT, 130, 1),
    "kill": (-signal.SIGKILL,),
    "kill_first": (-signal.SIGKILL,),
    "kill_in_request": (-signal.SIGKILL,),
    "terminate": (-signal.SIGTERM,),
    "terminate_all": (-signal.SIGTERM,),
    "terminate_in_flush": (-signal.SIGTERM,),
    "terminate_then_kill": (-signal.SIGTERM, -signal.SIGKILL),
}


@dataclass
class Lived:
    """A lifetime of the job.

    began, ended: monotonic clock, around the processes. state: what it resumed from, and parent: the lifetime
    that saved it. first: steps before it. is_second: it was started while another wrote the same run.
    """

    life: Lifetime
    began: float
    state: State | None
    first: int
    parent: Lived | None = None
    is_second: bool = False
    numbers_from: int = 0
    """The step of the run that this lifetime began after, in the run's own numbering."""
    processes: list[Process] = field(default_factory=list)
    ended: float = 0.0

    def events(self, rank: int, name: str) -> list[Event]:
        return [event for event in self.processes[rank].events if event["event"] == name]

    def ended_as_planned(self) -> bool:
        """Whether the process that was to die did so in the way it was to."""
        ending = self.life.ending
        if ending.kind == "kill_other":
            return bool(self.processes[ending.detail["rank"]].status == -signal.SIGKILL)
        return self.processes[0].status in _STATUS[ending.kind]

    def last_step(self, rank: int = 0) -> int:
        """The last step that the rank is known to have finished."""
        steps = self.events(rank, "step")
        return steps[-1]["step"] if steps else self.first

    def trained(self, rank: int, step: int, seed: int) -> Counted | None:
        """What the rank had trained in this lifetime after a step; None if it cannot have got there.

        A process that was killed may have finished one step more than it could say.
        """
        steps = self.events(rank, "step")
        if step <= self.first:
            return Counted()
        if step <= self.last_step(rank):
            event = steps[step - self.first - 1]
            return Counted(event["computed"], event["valid"], event["trained"])
        if step == self.last_step(rank) + 1:
            before = self.trained(rank, step - 1, seed)
            return None if before is None else before + recount(micro_batches(seed, rank, step))
        return None

    def holds(self, t_mono: float) -> bool:
        """Whether the processes lived at this time."""
        return self.began <= t_mono <= self.ended


def state_to_resume_from(lived: Sequence[Lived]) -> tuple[State | None, int, Lived | None]:
    """The state that the next lifetime loads, the steps that it takes as done, and who saved the state.

    A script that has no checkpoint begins again, in the same run if that is given.
    """
    past = [life for life in lived if not life.is_second]
    if not past:
        return None, 0, None
    if past[-1].life.resume == "continue":
        return None, past[-1].last_step(), None
    saved = [
        (event["state"], life)
        for life in past
        for event in life.events(0, "checkpoint")
        if event["state"] is not None
    ]
    if not saved:
        return None, 0, None
    state, parent = saved[-2] if past[-1].life.older and len(saved) > 1 else saved[-1]
    return state, state["step"], parent


def deeds_of(life: Lifetime, rank: int, first: int) -> list[dict[str, Any]]:
    """What a rank does to itself or waits for, by step; see `job`."""
    deeds: list[dict[str, Any]] = []

    def add(at: int, do: str, when: str = "after", **values: Any) -> None:
        closing = at == CLOSING
        deeds.append(
            {
                "step": first + (life.steps if closing else at),
                "when": "closing" if closing else when,
                "do": do,
            }
            | values
        )

    for number, fault in enumerate(life.faults if rank == 0 else ()):
        if (fault.kind in SERVER and fault.at) or fault.kind in MEETINGS:
            add(fault.at, "gate", name=f"begin {number}")
        if fault.kind in SERVER and fault.until is not None:
            add(fault.until, "gate", name=f"end {number}")
        if fault.kind in CLOCK:
            add(fault.at, "clock", shift=fault.detail["shift"])
        if fault.kind in DISK and fault.kind != "unwritable":
            add(fault.at, "disk", room=fault.detail["room"])
            if fault.until is not None:
                add(fault.until, "disk", room=None)
    _add_ending(life.ending, rank, add)
    return deeds


def _add_ending(ending: Fault, rank: int, add: Any) -> None:
    kind, when = ending.kind, ending.detail.get("when", "after")
    if kind == "terminate_all":
        add(ending.at, "signal", when, number=int(signal.SIGTERM))
    if kind == "kill_other" and rank == ending.detail["rank"]:
        add(ending.at, "signal", when, number=int(signal.SIGKILL))
    if rank:
        return
    if ending.detail.get("settled"):
        add(ending.at, "gate", when, name="settle")
    if kind in ("kill", "kill_first"):
        add(ending.at, "signal", when, number=int(signal.SIGKILL))
    elif kind == "terminate":
        add(ending.at, "signal", when, number=int(signal.SIGTERM))
    elif kind == "interrupt":
        add(ending.at, "signal", when, number=int(signal.SIGINT))
    elif kind == "exception":
        add(ending.at, "raise", when)
    elif kind == "os_exit":
        add(ending.at, "os_exit", when, status=7)
    elif kind == "sys_exit":
        add(ending.at, "sys_exit", when, status=0)
    elif kind in ("kill_in_request", "terminate_in_flush", "terminate_then_kill"):
        add(CLOSING, "gate", name="ending")
