"""A training script as users write it, for tests that run it in real processes.

Prints, as one JSON line a rank, a recount made with plain loops over plain lists.
"""

import argparse
import json
import os
import random
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=23)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--amp", action="store_true")
parser.add_argument("--loss", choices=["inside", "outside"], default="outside")
parser.add_argument(
    "--own-run", action="store_true", help="the script starts the MLflow run itself, after autolog"
)
parser.add_argument("--log-loss", action="store_true")
parser.add_argument("--visualdl")
parser.add_argument("--price")
parser.add_argument("--extra-steps", type=int, default=0, help="rank 1 goes on alone for so many steps")
parser.add_argument("--only-rank", type=int, help="the only rank that calls autolog")
parser.add_argument("--end", choices=["return", "raise", "interrupt"], default="return")
options = parser.parse_args()

import mlflow  # noqa: E402
import paddle  # noqa: E402
import paddle.distributed as dist  # noqa: E402
from paddle import nn  # noqa: E402
from paddle.nn import functional as F  # noqa: E402

import mlflow_tokens  # noqa: E402

PAD = 0
if options.only_rank in (None, dist.get_rank()):
    mlflow_tokens.autolog(price=options.price, pad_token_id=PAD, log_every_steps=5, visualdl=options.visualdl)


class Model(nn.Layer):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embedding(input_ids))
        return logits if labels is None else F.cross_entropy(logits, labels)


rank, world_size = dist.get_rank(), dist.get_world_size()
if world_size > 1:
    dist.init_parallel_env()
if options.own_run and rank == 0:
    mlflow.start_run(run_name="mine")
inner = Model()
model = paddle.DataParallel(inner) if world_size > 1 else inner
optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
numbers = random.Random(rank)
recount = {"rank": rank, "computed": 0, "valid": 0, "trained": 0}


def batch():
    width = numbers.randint(5, 9 + rank)
    rows = []
    for _ in range(3):
        length = numbers.randint(2, width)
        rows.append([numbers.randint(1, 49) for _ in range(length)] + [PAD] * (width - length))
    labels = [
        [-100 if token == PAD or place == 0 else token for place, token in enumerate(row)] for row in rows
    ]
    return rows, labels


def add(rows, labels):
    recount["computed"] += sum(len(row) for row in rows)
    recount["valid"] += sum(token != PAD for row in rows for token in row)
    recount["trained"] += sum(label != -100 for row in labels for label in row)


def train(module, rows, labels):
    rows, labels = paddle.to_tensor(rows), paddle.to_tensor(labels)
    with paddle.amp.auto_cast(enable=options.amp, dtype="bfloat16"):
        loss = module(rows, labels) if options.loss == "inside" else F.cross_entropy(module(rows), labels)
    loss.backward()
    return loss


for step in range(options.steps):
    made = [batch() for _ in range(options.accumulate)]
    for rows, labels in made:
        loss = train(model, rows, labels)
        add(rows, labels)
    optimizer.step()
    optimizer.clear_grad()
    if options.log_loss and rank == 0:
        mlflow.log_metric("loss", float(loss), step=step)
if rank == 1:
    for _ in range(options.extra_steps):
        rows, labels = batch()
        with model.no_sync():  # alone: nobody is there to average gradients with
            train(model, rows, labels)
        add(rows, labels)
        optimizer.step()
        optimizer.clear_grad()
if options.end != "return":
    train(model, *batch())  # a step that never ends
print("RECOUNT " + json.dumps(recount), flush=True)
if options.end == "raise":
    raise RuntimeError("the script fails")
if options.end == "interrupt":
    os.kill(os.getpid(), 2)
    sys.exit("SIGINT was swallowed")
