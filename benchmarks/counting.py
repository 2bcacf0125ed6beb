"""What counting a micro-batch costs the training thread, beside the loops that people paste.

Two ranks on CPU, so that an all-reduce is a real one; every way of counting takes its turn on every
micro-batch, in one process and in a random order. On a CPU reading a sum back (`.item()`) costs next to
nothing, while on an accelerator it waits for everything queued before it: that cannot be seen here.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS, WARM_UP = 3000, 1200
SHAPES = ((8, 512), (8, 2048))
OURS, OPERATIONS = "ours, mask", "device operations of ours alone"
ITEM, REDUCED = "paddle.sum(mask).item()", "paddle.sum(mask), all_reduce, .item()"


def measure() -> list[tuple[str, str, str]]:
    """Median microseconds a micro-batch of every way to count, and their ratios: what, figure, limit."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node=2"]
        subprocess.run(
            [*launcher, f"--log_dir={folder}/logs", __file__, f"{folder}/figures.json"],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"},
            cwd=folder,
            check=True,
            capture_output=True,
        )
        figures: dict[str, dict[str, float]] = json.loads(Path(folder, "figures.json").read_text())
    lines = []
    for shape, times in figures.items():
        for name, microseconds in times.items():
            lines.append((f"{shape}: {name}, µs", f"{microseconds:.1f}", ""))
        ours, bare = times[OURS], times[OPERATIONS]
        lines.append((f"{shape}: our own Python, µs", f"{ours - bare:.1f}", "20"))
        for name in (ITEM, REDUCED):
            lines.append((f"{shape}: ours / {name}", f"{ours / times[name]:.2f}", ""))
    return lines


def _ways(rows: int, width: int, feed: Any, twin: Any) -> dict[str, Callable[[], object]]:
    import paddle
    import paddle.distributed as dist

    ids = paddle.ones([rows, width], "int64")
    mask, flags = paddle.ones([rows, width], "int64"), paddle.ones([rows, width], "bool")
    total = {"device": paddle.zeros([], "int64"), "host": 0}

    def operations() -> None:
        with paddle.no_grad():
            total["device"] = total["device"] + (mask != 0).sum()

    def item() -> None:
        total["host"] += paddle.sum(mask).item()

    def reduced() -> None:
        count = paddle.sum(mask)
        dist.all_reduce(count)
        total["host"] += count.item()

    return {
        "a call of the model without us": lambda: twin(ids, mask),
        OURS: lambda: feed(ids, mask),
        "ours, boolean mask": lambda: feed(ids, flags),
        "ours, pad id": lambda: feed(ids),
        "ours, mask and labels in the model": lambda: feed(ids, mask, ids),
        OPERATIONS: operations,
        ITEM: item,
        REDUCED: reduced,
    }


def main(report: Path) -> None:
    """Measure on this rank of a job of two."""
    import paddle
    import paddle.distributed as dist
    from paddle import nn

    import mlflow_tokens

    class Feed(nn.Layer):
        """A model that does nothing once it is known, so that the call of it can be subtracted."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = self.create_parameter([1])

        def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
            return self.weight.sum() if input_ids.shape[0] == 1 else None

    dist.init_parallel_env()
    random.seed(0)  # both ranks reduce at the same time
    mlflow_tokens.autolog(pad_token_id=0, log_every_steps=10_000_000, silent=True)
    feed, twin = Feed(), Feed()
    optimizer = paddle.optimizer.SGD(1e-3, parameters=feed.parameters())
    feed(paddle.ones([1, 4], "int64")).backward()
    optimizer.step()
    figures: dict[str, dict[str, float]] = {}
    for rows, width in SHAPES:
        ways = _ways(rows, width, feed, twin)
        times: dict[str, list[float]] = {name: [] for name in ways}
        order = list(ways.items())
        for number in range(ROUNDS):
            random.shuffle(order)
            for name, way in order:
                began = time.perf_counter()
                way()
                taken = time.perf_counter() - began
                if number >= WARM_UP:
                    times[name].append(1e6 * taken)
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        without = medians.pop("a call of the model without us")
        for name in medians:
            medians[name] -= without if name.startswith("ours") else 0.0
        figures[f"{rows} rows of {width}"] = medians
    mlflow_tokens.autolog(disable=True)
    if dist.get_rank() == 0:
        report.write_text(json.dumps(figures))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        for line in measure():
            print(*line, sep="\t")
