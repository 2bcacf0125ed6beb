"""A rank that counts by hand, without Paddle: tokens of step k are 1000 * (rank + 1) + k.

Waits for a line on its standard input before it trains, and for another before it ends. Arguments: steps;
the interval between snapshots; seconds by which the clock on the wall is wrong.
"""

import os
import sys
import time

steps, every, wrong_by = map(int, sys.argv[1:])
true_time = time.time
time.time = lambda: true_time() + wrong_by

import mlflow_tokens  # noqa: E402

rank = int(os.environ["PADDLE_TRAINER_ID"])
with mlflow_tokens.Tracker(log_every_steps=every, price="2 USD/device-hour") as tracker:
    print("READY", flush=True)
    sys.stdin.readline()
    for step in range(1, steps + 1):
        tokens = 1000 * (rank + 1) + step
        tracker.count(computed=tokens, valid=tokens - 1)
        tracker.step()
    print("TRAINED", flush=True)
    sys.stdin.readline()
