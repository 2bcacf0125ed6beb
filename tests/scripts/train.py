"""A training script as users write it, for tests that run it in real processes.

Prints, as one JSON line a rank, a recount made with plain loops over plain lists.
"""

import argparse
import asyncio
import ctypes
import json
import multiprocessing
import os
import random
import signal
import sys
import time

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
parser.add_argument("--say-steps", action="store_true", help="print a recount after every step")
parser.add_argument("--children", action="store_true", help="fork some, and let them die of SIGTERM")
parser.add_argument(
    "--handler",
    choices=["before", "after", "chain"],
    help="handle SIGTERM itself, from before or after autolog on; chain: and hand it on",
)
parser.add_argument("--event-loop", action="store_true", help="run one that handles a signal, to its end")
parser.add_argument("--gate", help="before the end, wait until something is written to this named pipe")
ENDS = ["return", "raise", "interrupt", "exit", "os-exit", "kill", "sleep", "stuck", "barrier", "train"]
parser.add_argument("--end", choices=ENDS, default="return")
parser.add_argument("--end-rank", type=int, help="the only rank that ends so")
parser.add_argument("--others", choices=["train", "stuck"], default="train", help="what the others do then")
options = parser.parse_args()

import mlflow  # noqa: E402
import numpy as np  # noqa: E402
import paddle  # noqa: E402
import paddle.distributed as dist  # noqa: E402
from paddle import nn  # noqa: E402
from paddle.nn import functional as F  # noqa: E402

import mlflow_tokens  # noqa: E402

PAD = 0
told_to_end = []


def handle_sigterm():
    def handle(*signaled):
        print("SIGTERM, says the script", flush=True)
        if options.handler == "chain":
            handler_before(*signaled)
        else:
            told_to_end.append(True)

    handler_before = signal.signal(signal.SIGTERM, handle)


# What a shell starts in the background ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
if options.handler == "before":
    handle_sigterm()
if options.only_rank in (None, dist.get_rank()):
    mlflow_tokens.autolog(price=options.price, pad_token_id=PAD, log_every_steps=5, visualdl=options.visualdl)
if options.handler in ("after", "chain"):
    handle_sigterm()


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
recount = {"rank": rank, "step": 0, "computed": 0, "valid": 0, "trained": 0}


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


def say(word):
    print(f"{word} {json.dumps(recount)}", flush=True)


def train_step():
    made = [batch() for _ in range(options.accumulate)]
    for rows, labels in made:
        loss = train(model, rows, labels)
        add(rows, labels)
    optimizer.step()
    optimizer.clear_grad()
    recount["step"] += 1
    if options.say_steps:
        say("STEP")
    return loss


class Pids(paddle.io.Dataset):
    """The id of the process that reads it."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return np.array(os.getpid())


def children():
    """The exit statuses of forked processes, of which all but the last are told to terminate."""
    fork = multiprocessing.get_context("fork")
    sleeper = fork.Process(target=time.sleep, args=(600,), daemon=True)
    sleeper.start()
    before = set(multiprocessing.active_children())
    batches = iter(paddle.io.DataLoader(Pids(), num_workers=1))
    worker_pid = int(next(batches)[0])
    (worker,) = set(multiprocessing.active_children()) - before
    assert worker.pid == worker_pid != os.getpid()
    for child in (sleeper, worker):
        os.kill(child.pid, signal.SIGTERM)
        child.join(60)
    # One that ends as a script does, with everything that is registered for the exit.
    leaver = os.fork()
    if leaver == 0:
        sys.exit(0)
    return [sleeper.exitcode, worker.exitcode, os.waitstatus_to_exitcode(os.waitpid(leaver, 0)[1])]


def stay_in_c():
    """Never come back from a call that no signal interrupts: a mutex is locked twice."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


for step in range(options.steps):
    loss = train_step()
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
if options.children:
    print("CHILDREN", children(), flush=True)
if options.event_loop:
    loop = asyncio.new_event_loop()
    loop.add_signal_handler(signal.SIGUSR1, print)
    loop.remove_signal_handler(signal.SIGUSR1)
    loop.close()
ends_here = options.end_rank in (None, rank)
if options.gate and ends_here:
    with open(options.gate) as gate:
        gate.read()
if options.end in ("raise", "interrupt", "exit"):
    train(model, *batch())  # a step that never ends
say("RECOUNT")
if options.end == "raise":
    raise RuntimeError("the script fails")
if options.end == "interrupt":
    signal.raise_signal(signal.SIGINT)  # a signal to the process may reach another thread first, and late
    sys.exit("SIGINT was swallowed")
if options.end == "exit":
    sys.exit(3)
if options.end == "os-exit":
    os._exit(3)
if options.end == "kill" and ends_here:
    os.kill(os.getpid(), signal.SIGKILL)
if options.end == "sleep":
    while not told_to_end:
        time.sleep(0.02)
if options.end == "barrier" and rank == 0:
    dist.barrier()  # which the others never reach
if options.end in ("stuck", "barrier") or (not ends_here and options.others == "stuck"):
    stay_in_c()
if options.end == "train" or not ends_here:
    while True:
        train_step()
