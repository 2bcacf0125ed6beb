"""A tracker at work: what it costs the training thread, the machine and the process."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import mlflow
import numpy as np

import mlflow_tokens

#: Steps of a run whose calls are timed, between snapshots and between checkpoints; the first ones, in which
#: the run is opened and MLflow loaded, are left out.
STEPS, EVERY, SAVE_EVERY, WARM_UP = 2000, 10, 25, 500


def _tracker(folder: Path, uri: str, *, every: int = 1, **options: object) -> mlflow_tokens.Tracker:
    mlflow.set_tracking_uri(uri)
    return mlflow_tokens.Tracker(
        price="2 USD/device-hour",
        log_every_steps=every,
        journal_dir=folder / "journal",
        silent=True,
        **options,  # type: ignore[arg-type]
    )


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - began)


def _step(tracker: mlflow_tokens.Tracker) -> float:
    tracker.count(computed=8192, valid=8000, trained=7000)
    return _timed(tracker.step)


def emit(folder: Path, *, between: Callable[[], object]) -> dict[str, float]:
    """Microseconds on the training thread, which does `between` between two steps.

    What a snapshot adds to `tracker.step()` is the difference of the percentiles with and without one.
    """
    times: dict[str, list[float]] = {"with": [], "without": [], "state_dict": []}
    for _ in range(3):
        tracker = _tracker(folder, f"sqlite:///{folder}/emit.db", every=EVERY)
        for step in range(1, STEPS + 1):
            between()
            taken = _step(tracker)
            if step > WARM_UP:
                times["without" if step % EVERY else "with"].append(taken)
                if step % SAVE_EVERY == 0:
                    times["state_dict"].append(_timed(tracker.state_dict))
        tracker.close()
    figures = {}
    for name, percent in (("median", 50), ("99th percentile", 99)):
        at = {key: statistics.quantiles(values, n=100)[percent - 1] for key, values in times.items()}
        figures[f"a snapshot, {name}"] = at["with"] - at["without"]
        figures[f"a step without one, {name}"] = at["without"]
        figures[f"state_dict, {name}"] = at["state_dict"]
    return figures


def cold_caches() -> Callable[[], object]:
    """About 2 ms of reading memory, as training does: afterwards nothing of ours is in the caches."""
    numbers = np.ones(2_000_000)
    return numbers.sum


def cpu(folder: Path, uri: str, seconds: int = 60) -> dict[str, float]:
    """Percent of a core that each of our threads takes at one snapshot a second, the first 10 s left out."""
    tracker = _tracker(folder, uri)
    used: dict[str, float] = {}
    for second in range(seconds + 10):
        if second == 10:
            used = thread_seconds()
        _step(tracker)
        time.sleep(1.0)
    after = thread_seconds()
    tracker.close()
    return {name: 100 * (after[name] - used.get(name, 0.0)) / seconds for name in after}


def thread_seconds() -> dict[str, float]:
    """CPU seconds of our threads, from the scheduler (proc(5): schedstat, nanoseconds)."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.name.startswith("mlflow_tokens-"):
            path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            found[thread.name] = int(path.read_text().split()[0]) / 1e9
    return found


def files(folder: Path) -> tuple[int, int, list[int]]:
    """Open files before, the most of them during, and after each of three runs with every sink.

    A run takes 1,000 snapshots: 200 at an interval of 1, of 2, of 4, of 8 and of 16.
    """

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = most = count()
    after = []
    for number in range(3):
        tracker = _tracker(
            folder,
            f"sqlite:///{folder}/files.db",
            visualdl=folder / f"visualdl-{number}",
            jsonl=folder / f"points-{number}.jsonl",
        )
        for _ in range(200 * 31):
            _step(tracker)
            most = max(most, count())
        tracker.close()
        after.append(count())
    return before, most, after
