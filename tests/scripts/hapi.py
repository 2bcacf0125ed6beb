"""`paddle.Model.fit` as a script calls it, for tests that run it in real processes.

Prints, as one JSON line a rank, a recount of the rows that this rank was given, made with plain loops.
"""

import argparse
import json

parser = argparse.ArgumentParser()
parser.add_argument(
    "--mlflow", choices=["before", "after"], help="MLflow's autologging, too: before or after ours"
)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--save-dir")
parser.add_argument("--end", choices=["return", "raise"], default="return")
options = parser.parse_args()

import mlflow  # noqa: E402
import numpy as np  # noqa: E402
import paddle  # noqa: E402
import paddle.distributed as dist  # noqa: E402

import mlflow_tokens  # noqa: E402
from tests.hapi import LENGTHS, callback, hapi_model, text  # noqa: E402
from tests.loops import PAD  # noqa: E402

if options.mlflow == "before":
    mlflow.paddle.autolog(log_models=False)
mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=2, price="2 USD/device-hour")
if options.mlflow == "after":
    mlflow.paddle.autolog(log_models=False)

WIDTH = max(LENGTHS)
recount = {"rank": dist.get_rank(), "rows": 0, "computed": 0, "valid": 0, "trained": 0}


class Rows(paddle.io.Dataset):
    """Nine rows: of two ranks one is given the first row once more, so that both have three batches."""

    def __init__(self, counted):
        self.counted = counted

    def __getitem__(self, index):
        row = text(index)
        ids = row + [PAD] * (WIDTH - len(row))
        labels = [-100, -100] + row[2:] + [-100] * (WIDTH - len(row))
        if self.counted:
            recount["rows"] += 1
            for token, label in zip(ids, labels, strict=True):
                recount["computed"] += 1
                recount["valid"] += token != PAD
                recount["trained"] += label != -100
        return np.array(ids), np.array(labels)

    def __len__(self):
        return 9


def fails(epoch, logs=None):
    if options.end == "raise" and epoch == 1:
        raise RuntimeError("the callback fails")


try:
    hapi_model().fit(
        Rows(True),
        eval_data=Rows(False),
        batch_size=2,
        epochs=3,
        verbose=0,
        shuffle=False,
        accumulate_grad_batches=options.accumulate,
        save_dir=options.save_dir,
        callbacks=[callback(on_epoch_end=fails)],
    )
finally:
    print(f"RECOUNT {json.dumps(recount)}", flush=True)
