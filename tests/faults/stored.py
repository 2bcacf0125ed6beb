"""What the store has of a run, read from its table: past the server, the proxies and all of our code."""

from __future__ import annotations

import math
import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path

OURS = ("tokens/", "throughput/", "cost/", "device/", "energy/", "progress/")

#: Metric, step, time in ms.
Point = tuple[str, int, int]


def stored_points(database: Path, run: str) -> dict[Point, list[float]]:
    """All points of our metrics, with every value that is stored for each."""
    points: dict[Point, list[float]] = defaultdict(list)
    with closing(sqlite3.connect(f"file:{database}?mode=ro", timeout=30, uri=True)) as store:
        rows = store.execute(
            "SELECT key, step, timestamp, value, is_nan FROM metrics WHERE run_uuid = ?", (run,)
        )
        for name, step, timestamp, value, is_nan in rows:
            if name.startswith(OURS):
                points[(name, step, timestamp)].append(math.nan if is_nan else value)
    return points
