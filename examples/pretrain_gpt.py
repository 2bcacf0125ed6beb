"""Pretrain a small GPT on Chinese text, in one process or many.

    python examples/pretrain_gpt.py --batching packed
    python -m paddle.distributed.launch --nproc_per_node 2 examples/pretrain_gpt.py --batching padded

One line is about tracking: `mlflow_tokens.autolog(...)`. Where it logs to is said by
the environment variables MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and MLFLOW_RUN_NAME.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from batches import IGNORE_INDEX, MODES, Batch, make_batches
from paddle import Tensor, nn
from tokenizer import BOS_ID, PAD_ID, VOCABULARY, load_documents

import mlflow_tokens

HELD_OUT = 128  # documents at the end of the corpus that are never trained on
EVALUATIONS = 3  # in a run, spread evenly, the last one at its end


class Block(nn.Layer):
    """Pre-LN: x + attention(LN(x)), then x + MLP(LN(x)). From and to [rows, length, hidden]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.norm_mlp = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(approximate=True), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, hidden = x.shape
        query_key_value = self.query_key_value(self.norm_attention(x))
        query, key, value = query_key_value.reshape(
            [rows, length, 3, self.heads, hidden // self.heads]
        ).unbind(axis=2)
        # Causal is all the mask there need be: padding is on the right, so no token ever looks at it.
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.reshape([rows, length, hidden]))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Layer):
    """A decoder with learned positions; the output layer is the token embedding, transposed."""

    def __init__(self, vocabulary: int, max_length: int, hidden: int, layers: int, heads: int) -> None:
        super().__init__()
        initial = paddle.ParamAttr(initializer=nn.initializer.Normal(std=0.02))
        self.tokens = nn.Embedding(vocabulary, hidden, weight_attr=initial)
        self.positions = nn.Embedding(max_length, hidden, weight_attr=initial)
        self.blocks = nn.Sequential(*(Block(hidden, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[rows, length] ids to [rows, length, vocabulary] logits."""
        x = self.tokens(input_ids) + self.positions(paddle.arange(input_ids.shape[1]))
        return paddle.matmul(self.norm(self.blocks(x)), self.tokens.weight, transpose_y=True)


def main() -> None:
    args = arguments()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > 1:
        dist.init_parallel_env()
    paddle.seed(args.seed)

    mlflow_tokens.autolog(price=args.price, pad_token_id=PAD_ID, visualdl=args.visualdl)

    documents = load_documents(args.data_dir)
    sharding = {
        "batch_size": args.batch_size,
        "max_length": args.max_length,
        "pad_id": PAD_ID,
        "bos_id": BOS_ID,
        "rank": rank,
        "world_size": world_size,
    }
    training = documents[:-HELD_OUT][: args.documents]
    one_pass = make_batches(args.batching, training, seed=args.seed, **sharding)
    steps = args.steps or len(one_pass) // args.accumulate
    if not one_pass or not steps:
        raise SystemExit(f"{len(training)} documents make {len(one_pass)} batches: too few for one step")
    # Held-out text is batched in the same way whatever --batching is, so that losses of runs can be compared.
    held_out = make_batches("grouped", documents[-HELD_OUT:], **sharding)

    model = GPT(VOCABULARY, args.max_length, args.hidden, args.layers, args.heads)
    schedule = warmup_then_cosine(args.learning_rate, steps)
    optimizer = paddle.optimizer.AdamW(
        schedule,
        parameters=model.parameters(),
        weight_decay=0.1,
        grad_clip=nn.ClipGradByGlobalNorm(1.0),
    )
    if world_size > 1:
        model = paddle.DataParallel(model)
    if rank == 0:
        size = sum(math.prod(parameter.shape) for parameter in model.parameters())
        print(
            f"{size:,} parameters, {len(training):,} documents, {steps:,} steps, {world_size} workers",
            flush=True,
        )

    stream = endless(one_pass)
    started = time.monotonic()
    for step in range(1, steps + 1):
        model.train()
        total = 0.0
        for _ in range(args.accumulate):
            batch = next(stream)
            input_ids, labels = paddle.to_tensor(batch["input_ids"]), paddle.to_tensor(batch["labels"])
            with paddle.amp.auto_cast(enable=args.amp, dtype="bfloat16"):
                logits = model(input_ids)
                loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
            # Not reduction="mean": with a negative ignore_index Paddle's mean divides by padding, too.
            loss = loss / (int((batch["labels"] != IGNORE_INDEX).sum()) * args.accumulate)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.clear_grad()
        schedule.step()

        if rank == 0 and (step % args.print_every == 0 or step in (1, steps)):
            seconds = time.monotonic() - started
            print(f"step {step}/{steps}  {describe(float(total))}  {seconds:.1f} s", flush=True)
        if step % math.ceil(steps / EVALUATIONS) == 0 or step == steps:
            held_out_loss = evaluate(model, held_out, world_size)
            if rank == 0:
                print(f"held out after step {step}  {describe(held_out_loss)}", flush=True)


@paddle.no_grad()
def evaluate(model: nn.Layer, batches: list[Batch], world_size: int) -> float:
    """Mean loss, in nats per token, over the held-out batches of all ranks."""
    model.eval()
    loss_and_tokens = paddle.zeros([2])
    for batch in batches:
        labels = paddle.to_tensor(batch["labels"])
        logits = model(paddle.to_tensor(batch["input_ids"]))
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        loss_and_tokens += paddle.stack([loss, (labels != IGNORE_INDEX).sum().astype(loss.dtype)])
    if world_size > 1:
        dist.all_reduce(loss_and_tokens)
    loss, tokens = loss_and_tokens.tolist()
    return loss / tokens


def warmup_then_cosine(peak: float, steps: int) -> paddle.optimizer.lr.LRScheduler:
    """A tenth of the steps up to the peak in a line, the rest down to a tenth of it along a cosine."""
    warmup = 1 + steps // 10
    decay = paddle.optimizer.lr.CosineAnnealingDecay(peak, T_max=max(1, steps - warmup), eta_min=peak / 10)
    return paddle.optimizer.lr.LinearWarmup(decay, warmup, start_lr=peak / (warmup + 1), end_lr=peak)


def endless(batches: list[Batch]) -> Iterator[Batch]:
    """The batches again and again, for runs of more steps than one pass has."""
    while True:
        yield from batches


def describe(loss: float) -> str:
    return f"loss {loss:.3f}  ppl {math.exp(loss):.0f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Pretrain a small GPT on Chinese text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--batching", choices=MODES, default="padded", help="how documents become batches, see batches.py")
    add("--documents", type=int, default=8000, help="train on this many documents")
    add("--steps", type=int, help="optimizer steps; not given: one pass over the documents")
    add("--batch-size", type=int, default=8, help="rows of a micro-batch on each worker")
    add("--accumulate", type=int, default=1, help="micro-batches in an optimizer step")
    add("--max-length", type=int, default=128, help="tokens in a row at most: longer documents are cut")
    add("--hidden", type=int, default=96, help="width of the model, a multiple of --heads")
    add("--layers", type=int, default=2, help="transformer blocks")
    add("--heads", type=int, default=2, help="attention heads")
    add("--learning-rate", type=float, default=3e-3, help="after warmup, the highest")
    add("--amp", action="store_true", help="compute in bfloat16 where it is safe")
    add("--seed", type=int, default=0, help="of the initial weights and of the order of the documents")
    add("--print-every", type=int, default=5, metavar="STEPS", help="print the training loss this often")
    add(
        "--data-dir", type=Path, default=Path(".demo/data"), help="keep the tokenizer and tokenised text here"
    )
    add("--visualdl", metavar="DIRECTORY", help="log to VisualDL as well, into this directory")
    add("--price", help="what a device costs, such as '2.0 CNY/device-hour'; not given: tokens, but no cost")
    return parser.parse_args()


if __name__ == "__main__":
    main()
