"""A tracker at work: what it costs the training thread, the machine and the process."""

from __future__ import annotations

import os
import statistics
import threading
import time
from pathlib import Path

import mlflow

import mlflow_tokens


def _tracker(folder: Path, uri: str, **options: object) -> mlflow_tokens.Tracker:
    mlflow.set_tracking_uri(uri)
    return mlflow_tokens.Tracker(
        price="2 USD/device-hour",
        log_every_steps=1,
        journal_dir=folder / "journal",
        silent=True,
        **options,  # type: ignore[arg-type]
    )


def _step(tracker: mlflow_tokens.Tracker) -> float:
    tracker.count(computed=8192, valid=8000, trained=7000)
    began = time.perf_counter()
    tracker.step()
    return 1e6 * (time.perf_counter() - began)


def emit(folder: Path) -> dict[str, float]:
    """Microseconds of `tracker.step()` that takes a snapshot, of one that does not, of `state_dict()`."""
    tracker = _tracker(folder, f"sqlite:///{folder}/emit.db")
    _step(tracker)  # opens the run: once
    with_snapshot: list[float] = []
    checkpoint: list[float] = []
    for _ in range(190):
        with_snapshot.append(_step(tracker))
        began = time.perf_counter()
        tracker.state_dict()
        checkpoint.append(1e6 * (time.perf_counter() - began))
        time.sleep(0.02)
    without = sorted(_step(tracker) for _ in range(2000))
    tracker.close()
    return {
        "step with a snapshot, median": statistics.median(with_snapshot),
        "step with a snapshot, 99th percentile": statistics.quantiles(with_snapshot, n=100)[98],
        "step without (of 2,000, half of them with), median": statistics.median(without),
        "state_dict, median": statistics.median(checkpoint),
        "state_dict, 99th percentile": statistics.quantiles(checkpoint, n=100)[98],
    }


def cpu(folder: Path, uri: str, seconds: int = 60) -> dict[str, float]:
    """Percent of a core that each of our threads takes at one snapshot a second, the first 10 s left out."""
    tracker = _tracker(folder, uri)
    used: dict[str, float] = {}
    for second in range(seconds + 10):
        if second == 10:
            used = _thread_seconds()
        _step(tracker)
        time.sleep(1.0)
    after = _thread_seconds()
    tracker.close()
    return {name: 100 * (after[name] - used.get(name, 0.0)) / seconds for name in after}


def _thread_seconds() -> dict[str, float]:
    """CPU seconds of our threads, from the scheduler (proc(5): schedstat, nanoseconds)."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.name.startswith("mlflow_tokens-"):
            path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            found[thread.name] = int(path.read_text().split()[0]) / 1e9
    return found


def files(folder: Path) -> tuple[int, int, int]:
    """Open files before the first snapshot, the most of them during 1,000 with every sink, and after."""

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    tracker = _tracker(
        folder, f"sqlite:///{folder}/files.db", visualdl=folder / "vdl", jsonl=folder / "points.jsonl"
    )
    most = 0
    for _ in range(20_000):  # 1,000 snapshots or so, at the doubling interval
        _step(tracker)
        most = max(most, count())
    tracker.close()
    return before, most, count()
