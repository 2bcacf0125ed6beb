"""A hybrid parallel training script as users write it with fleet, for tests that run it in real processes.

The first rank of those that are fed the same tokens prints a recount, made with plain loops over lists.
"""

import argparse
import json
import os
import random

parser = argparse.ArgumentParser()
for axis in ("dp", "sharding", "sep", "mp", "pp"):
    parser.add_argument(f"--{axis}", type=int, default=1)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--split", choices=["before", "inside"], default="before", help="of the sequence")
parser.add_argument("--recompute", action="store_true")
parser.add_argument("--stock", action="store_true", help="without the shim for CPUs")
parser.add_argument("--corpus", type=int, nargs=2, help="train once on these rows of tests/corpus.py")
parser.add_argument("--state", help="go on from this checkpoint, if it is there, and leave one")
options = parser.parse_args()

import paddle  # noqa: E402
from paddle import nn  # noqa: E402
from paddle.distributed import fleet  # noqa: E402
from paddle.distributed.fleet.meta_parallel import (  # noqa: E402
    ColumnParallelLinear,
    LayerDesc,
    ParallelCrossEntropy,
    PipelineLayer,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from paddle.distributed.fleet.utils import recompute  # noqa: E402
from paddle.nn import functional as F  # noqa: E402

import mlflow_tokens  # noqa: E402
from tests import corpus  # noqa: E402

PAD, ROWS = corpus.PAD, 2
WIDTH = corpus.WIDTH if options.corpus else 8
mlflow_tokens.autolog(price="2 USD/device-hour", pad_token_id=PAD, log_every_steps=2)

if not options.stock:
    from tests.gloo_shim import install

    install()
strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {
    "dp_degree": options.dp,
    "sharding_degree": options.sharding,
    "sep_degree": options.sep,
    "mp_degree": options.mp,
    "pp_degree": options.pp,
}
strategy.pipeline_configs = {"accumulate_steps": options.accumulate, "micro_batch_size": ROWS}
fleet.init(is_collective=True, strategy=strategy)
group = fleet.get_hybrid_communicate_group()
paddle.seed(1)


class Model(nn.Layer):
    def __init__(self):
        super().__init__()
        split = options.mp > 1
        self.embedding = VocabParallelEmbedding(48, 8) if split else nn.Embedding(48, 8)
        self.up = ColumnParallelLinear(8, 16, gather_output=False) if split else nn.Linear(8, 16)
        self.down = RowParallelLinear(16, 8, input_is_parallel=True) if split else nn.Linear(16, 8)
        self.head = (
            ColumnParallelLinear(8, 48, has_bias=False, gather_output=False) if split else nn.Linear(8, 48)
        )

    def block(self, hidden):
        return self.down(F.relu(self.up(hidden)))

    def forward(self, input_ids):
        if options.sep > 1 and options.split == "inside":
            input_ids = paddle.split(input_ids, options.sep, axis=1)[group.get_sep_parallel_rank()]
        hidden = self.embedding(input_ids)
        hidden = recompute(self.block, hidden) if options.recompute else self.block(hidden)
        return self.head(hidden)


def loss_of(logits, labels):
    if options.mp > 1:
        return ParallelCrossEntropy()(logits, labels.unsqueeze(-1)).mean()
    return F.cross_entropy(logits, labels)


class Pipe(PipelineLayer):
    def __init__(self):
        descriptions = [
            LayerDesc(nn.Embedding, 48, 8),
            LayerDesc(nn.Linear, 8, 8),
            LayerDesc(nn.Linear, 8, 48),
        ]
        super().__init__(layers=descriptions, loss_fn=loss_of, topology=group.topology())


model = Pipe() if options.pp > 1 else Model()
optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
if group.nranks > 1:
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)

fed = group.get_data_parallel_rank() * options.sharding + group.get_sharding_parallel_rank()
numbers = random.Random(fed)
rows_left = []
if options.corpus:
    rows_left = list(range(*options.corpus))[fed :: options.dp * options.sharding]
    options.steps = len(rows_left) // (ROWS * options.accumulate)
if options.state and os.path.exists(options.state):
    with open(options.state) as state:
        mlflow_tokens.current().load_state_dict(json.load(state))
recount = {"computed": 0, "valid": 0, "trained": 0}


def batch(rows):
    if options.corpus:
        taken = [rows_left.pop(0) for _ in range(rows)]
        return tuple(paddle.to_tensor([of(row) for row in taken]) for of in (corpus.ids_of, corpus.labels_of))
    texts = [[numbers.randint(1, 47) for _ in range(numbers.randint(2, WIDTH))] for _ in range(rows)]
    ids = [text + [PAD] * (WIDTH - len(text)) for text in texts]
    labels = [[token if token != PAD else -100 for token in row] for row in ids]
    recount["computed"] += sum(len(row) for row in ids)
    recount["valid"] += sum(token != PAD for row in ids for token in row)
    recount["trained"] += sum(label != -100 for row in labels for label in row)
    return paddle.to_tensor(ids), paddle.to_tensor(labels)


def sliced(tensor):
    return (
        paddle.split(tensor, options.sep, axis=1)[group.get_sep_parallel_rank()]
        if options.sep > 1
        else tensor
    )


for _ in range(options.steps):
    if options.pp > 1:
        loss = model.train_batch(batch(ROWS * options.accumulate), optimizer)
        optimizer.clear_grad()
        continue
    for _ in range(options.accumulate):
        ids, labels = batch(ROWS)
        loss = loss_of(model(ids if options.split == "inside" else sliced(ids)), sliced(labels))
        loss.backward()
    if options.sep > 1 or options.dp > 1:
        fleet.utils.hybrid_parallel_util.fused_allreduce_gradients(list(model.parameters()), group)
    optimizer.step()
    optimizer.clear_grad()

if options.state and group.get_global_rank() == 0:
    with open(options.state, "w") as state:
        json.dump(mlflow_tokens.current().state_dict(), state)
repeats = group.get_model_parallel_rank() or group.get_stage_id() or group.get_sep_parallel_rank()
if not repeats:
    print("RECOUNT", json.dumps(recount), flush=True)
print("ENDED", os.environ.get("PADDLE_TRAINER_ID", "0"), flush=True)
