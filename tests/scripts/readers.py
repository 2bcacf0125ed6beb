"""Training that reads from a `paddle.io.DataLoader`, rank 1 slowly; each rank times its waits itself."""

import json
import time

import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.nn import functional as F

import mlflow_tokens

STEPS, SLEEP = 12, 0.05
mlflow_tokens.autolog(price="3600 USD/device-hour", pad="none", log_every_steps=4)
dist.init_parallel_env()
slow = dist.get_rank() == 1


class Rows(paddle.io.Dataset):
    def __len__(self):
        return 2 * STEPS

    def __getitem__(self, number):
        if slow:
            time.sleep(SLEEP)
        return [number % 7 + 1] * 6


class Model(nn.Layer):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, input_ids):
        return self.head(self.embedding(input_ids))


model = paddle.DataParallel(Model())
optimizer = paddle.optimizer.SGD(1e-3, parameters=model.parameters())
reader = iter(paddle.io.DataLoader(Rows(), batch_size=2, collate_fn=paddle.to_tensor))
waited, batches = 0.0, 0
while True:
    began = time.monotonic()
    ids = next(reader, None)
    if ids is None:
        break
    batches += 1
    if batches > 1:  # before the first step it is all startup
        waited += time.monotonic() - began
    loss = F.cross_entropy(model(ids), ids)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
dist.barrier()
print("WAITED", json.dumps({"rank": dist.get_rank(), "waited": waited, "batches": batches}), flush=True)
