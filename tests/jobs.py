"""Runs tests/scripts/train.py in real processes and reads its recount."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Done:
    """A job that has ended: its exit status, what every rank printed, and the sum of their recounts."""

    status: int
    output: str
    recount: dict[str, int]


def run_alone(*arguments: str, cwd: Path, **environ: str) -> Done:
    return _run([sys.executable, str(SCRIPT), *arguments], cwd, environ, None)


def launch(processes: int, *arguments: str, cwd: Path, **environ: str) -> Done:
    """Under `python -m paddle.distributed.launch`, as a user would."""
    logs = cwd / "logs"
    command = [sys.executable, "-m", "paddle.distributed.launch", f"--nproc_per_node={processes}"]
    return _run([*command, f"--log_dir={logs}", str(SCRIPT), *arguments], cwd, environ, logs)


def _run(command: list[str], cwd: Path, environ: dict[str, str], logs: Path | None) -> Done:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environ
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    output = done.stdout + done.stderr
    if logs is not None:
        output = "\n".join(path.read_text() for path in sorted(logs.glob("workerlog.*")))
    recount: dict[str, int] = {"ranks": 0, "computed": 0, "valid": 0, "trained": 0}
    for line in re.findall(r"^RECOUNT (.*)$", output, re.MULTILINE):
        counted = json.loads(line)
        recount["ranks"] += 1
        for kind in ("computed", "valid", "trained"):
            recount[kind] += counted[kind]
    return Done(done.returncode, output, recount)
