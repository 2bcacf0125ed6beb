"""How long the machines are held: what tells one allocation, and one boot of a machine, from the next."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path

#: Set it to name the allocation where no scheduler below does.
VARIABLE = "MLFLOW_TOKENS_ALLOCATION"


def boot_id() -> str:
    """Names this boot of the machine (random(4)); "" where that cannot be known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def allocation_of(environ: Mapping[str, str]) -> str:
    """The name of the allocation that this process runs in; where it is unknown, the process itself.

    Processes with the same name share their machines without a pause: by $MLFLOW_TOKENS_ALLOCATION, by
    the job of Slurm (until it is requeued), PBS or LSF, or because one launcher of Paddle started them.
    """
    if named := environ.get(VARIABLE):
        return named
    if job := environ.get("SLURM_JOB_ID"):
        return f"slurm:{job}.{environ.get('SLURM_RESTART_COUNT', '0')}"
    for scheduler, variable in (("pbs", "PBS_JOBID"), ("lsf", "LSB_JOBID")):
        if job := environ.get(variable):
            return f"{scheduler}:{job}"
    if "PADDLE_TRAINER_ENDPOINTS" in environ:
        return f"launcher:{boot_id()}:{_process(os.getppid())}"
    return f"process:{boot_id()}:{_process(os.getpid())}"


def _process(number: int) -> str:
    """A process and when it was started (proc(5), field 22): a later one may have its number."""
    try:
        stat = Path(f"/proc/{number}/stat").read_text("ascii", errors="replace")
    except OSError:
        return uuid.uuid4().hex  # nothing else is in its allocation
    return f"{number}.{stat.rpartition(')')[2].split()[19]}"
