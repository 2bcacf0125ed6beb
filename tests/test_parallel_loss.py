"""Labels that go into the loss of a vocabulary split over ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import Stored
from tests.jobs import ROOT
from tests.loops import Recount, dataset

SCRIPT = """
import json, sys
import mlflow_tokens, paddle
from paddle.distributed import fleet
from paddle.distributed.fleet.layers.mpu import mp_ops
from tests.loops import Model

def stand_in_for_the_gpu_kernel(logits, label, group=None, ignore_index=-100):
    label = label.unsqueeze(-1)
    kept = label != ignore_index
    log_probabilities = paddle.nn.functional.log_softmax(logits)
    chosen = paddle.take_along_axis(log_probabilities, label * kept.astype("int64"), -1)
    return -chosen * kept.astype("float32")

mp_ops._c_softmax_with_cross_entropy = stand_in_for_the_gpu_kernel
fleet.init(is_collective=True)
mlflow_tokens.autolog(pad_token_id=3)
model, loss_of = Model(), fleet.meta_parallel.ParallelCrossEntropy(ignore_index=1)
optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
for ids, labels in json.loads(sys.argv[1]):
    loss_of(model(paddle.to_tensor(ids)), paddle.to_tensor(labels)).mean().backward()
    optimizer.step()
    optimizer.clear_grad()
"""


def test_parallel_cross_entropy(stored: Stored, tmp_path: Path) -> None:
    """The ignore_index is the layer's own. There is no kernel of it for CPUs, so that is a stand-in."""
    batches, recount = dataset(4, ignore_index=1), Recount()
    for ids, labels in batches:
        recount.add(ids, labels, ignore_index=1)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(batches)],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": stored.uri, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert recount.equals(stored.metrics())
