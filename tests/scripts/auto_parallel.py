"""Auto parallel training in dynamic graphs, as users write it with shard_tensor, for tests in real processes.

Every process holds the whole batch as a tensor that is spread over the mesh; process 0 prints the recount.
"""

import argparse
import json
import random

parser = argparse.ArgumentParser()
parser.add_argument("--mesh", choices=["dp", "mp"], default="dp", help="what the two processes share")
options = parser.parse_args()

import paddle  # noqa: E402
import paddle.distributed as dist  # noqa: E402
from paddle import nn  # noqa: E402

import mlflow_tokens  # noqa: E402

mlflow_tokens.autolog(pad_token_id=0, log_every_steps=2)
dist.init_parallel_env()
mesh = dist.ProcessMesh([0, 1], dim_names=[options.mesh])
spread = [dist.Shard(0) if options.mesh == "dp" else dist.Replicate()]
numbers = random.Random(0)
recount = {"computed": 0, "valid": 0, "trained": 0}


class Model(nn.Layer):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50)

    def forward(self, input_ids):
        return self.head(self.embedding(input_ids))


def replicate(_name, layer, over):
    for key, parameter in layer._parameters.items():
        if parameter is not None:
            layer.add_parameter(key, dist.shard_tensor(parameter, over, [dist.Replicate()]))


paddle.seed(1)
model = dist.shard_layer(Model(), mesh, replicate)
optimizer = dist.shard_optimizer(paddle.optimizer.AdamW(1e-3, parameters=model.parameters()))
criterion = nn.CrossEntropyLoss()
for _ in range(6):
    texts = [[numbers.randint(1, 49) for _ in range(numbers.randint(2, 8))] for _ in range(4)]
    ids = [text + [0] * (8 - len(text)) for text in texts]
    labels = [[-100 if token == 0 or place == 0 else token for place, token in enumerate(row)] for row in ids]
    recount["computed"] += sum(len(row) for row in ids)
    recount["valid"] += sum(token != 0 for row in ids for token in row)
    recount["trained"] += sum(label != -100 for row in labels for label in row)
    ids, labels = (dist.shard_tensor(paddle.to_tensor(rows), mesh, spread) for rows in (ids, labels))
    criterion(model(ids), labels).backward()
    optimizer.step()
    optimizer.clear_grad()
if dist.get_rank() == 0:
    print("RECOUNT", json.dumps(recount), flush=True)
