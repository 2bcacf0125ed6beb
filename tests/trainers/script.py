"""A training script as a user of PaddleNLP's or PaddleFormers' Trainer writes it, with a recount of its own.

Its only argument is a JSON object; DEFAULTS says what may be in it. After every step it prints a line
"STEP {…}" with the recount so far, in which plain Python loops go over the plain lists that the data is
made of.
"""

import importlib
import json
import sys
import threading
import time

import mlflow_tokens

DEFAULTS = {
    "library": "paddlenlp",
    "install": "autolog",  # or "callback", "added" (a callback, later) or "none"
    "options": {},
    "batches": "padded",  # or "fixed" (all 12 wide), "full" (without padding), "packed", "pairs", "dpo"
    "mask": True,
    "criterion": None,  # or "library", "pieces", "layer", "function"
    "fused": False,  # the head and the loss are one, and see four positions at a time
    "lora": False,
    "tokenizer": None,  # or the name of its pad token
    "arguments": {},
    "rows": 10,
    "resume": None,
    "hang_after": None,
    "mlflow": False,
    "trainings": 1,
    "shim": False,  # for parallelism that Paddle does not have on CPUs
}
CASE = {**DEFAULTS, **json.loads(sys.argv[1])}
if CASE["install"] == "autolog":
    mlflow_tokens.autolog(**CASE["options"])

import mlflow  # noqa: E402
import numpy as np  # noqa: E402
import paddle  # noqa: E402
from paddle.nn import functional as F  # noqa: E402

trainers = importlib.import_module(CASE["library"] + ".trainer")
transformers = importlib.import_module(CASE["library"] + ".transformers")
FORMERS = CASE["library"] == "paddleformers"

if CASE["shim"]:
    from tests.gloo_shim import install

    install()
VOCABULARY, PAD, IGNORED, WIDTH = 64, 3, -100, 12
WORDS = {name: number for number, name in enumerate(["<unk>", "<s>", "</s>", "<pad>"])}
if FORMERS:
    # Its checkpoints are loaded with the help of this.
    paddle.distributed.fleet.init(is_collective=True)
    # It is called after every step of several micro-batches, and is not there for CPUs.
    paddle.device.synchronize = lambda *_: None


def rows_of(count, seed):
    """Texts of different lengths, none of which has a special token in it."""
    rng = np.random.default_rng(seed)
    lengths = [WIDTH if CASE["batches"] == "full" else int(rng.integers(5, WIDTH)) for _ in range(count)]
    return [[int(token) for token in rng.integers(4, VOCABULARY, length)] for length in lengths]


class Rows(paddle.io.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"text": self.rows[index]}


def padded(rows, width, filler):
    return np.array([row + [filler] * (width - len(row)) for row in rows], dtype="int64")


def labels_of(row):
    """The first two are a prompt."""
    return [IGNORED] * 2 + row[2:]


def collate(samples):
    rows = [sample["text"] for sample in samples]
    if CASE["batches"] == "packed":
        return pack(rows)
    if CASE["batches"] == "pairs":
        return pair(rows)
    if CASE["batches"] == "dpo":
        return dpo(rows)
    width = max(map(len, rows)) if CASE["batches"] == "padded" else WIDTH
    batch = {
        "input_ids": padded(rows, width, PAD),
        "labels": padded([labels_of(row) for row in rows], width, IGNORED),
    }
    if CASE["mask"]:
        batch["attention_mask"] = padded([[1] * len(row) for row in rows], width, 0)
    return {name: paddle.to_tensor(value) for name, value in batch.items()}


def pack(rows):
    """All rows in one, each seeing itself alone, and padding at the end."""
    width = WIDTH * len(rows)
    mask = np.zeros([1, 1, width, width], dtype=bool)
    begin = 0
    for row in rows:
        end = begin + len(row)
        mask[0, 0, begin:end, begin:end] = np.tril(np.ones([len(row), len(row)], dtype=bool))
        begin = end
    mask[0, 0, range(begin, width), range(begin, width)] = True
    batch = {
        "input_ids": padded([[token for row in rows for token in row]], width, PAD),
        "labels": padded([[label for row in rows for label in labels_of(row)]], width, IGNORED),
        "position_ids": padded([[place for row in rows for place in range(len(row))]], width, 0),
        "attention_mask": mask,
    }
    return {name: paddle.to_tensor(value) for name, value in batch.items()}


def pair(rows):
    """A row and the same backwards: the second is the worse answer, and two tokens shorter."""
    batch = {}
    for name, texts in (("chosen", rows), ("rejected", [row[:1:-1] for row in rows])):
        width = max(map(len, texts))
        batch[f"{name}_input_ids"] = padded(texts, width, PAD)
        batch[f"{name}_attention_mask"] = padded([[1] * len(text) for text in texts], width, 0)
        batch[f"{name}_labels"] = padded([labels_of(text) for text in texts], width, IGNORED)
    return {name: paddle.to_tensor(value) for name, value in batch.items()}


def dpo(rows):
    """As PaddleNLP's DPO data: two tokens of prompt, the chosen answer, the rejected one, padding of id 0."""
    width, indexes = 2 * WIDTH, []
    for number, row in enumerate(rows):
        indexes.append([number, 2, len(row), 2 * len(row) - 2])
    texts = [row + row[2:] for row in rows]
    positions = [[*range(len(row)), *range(2, len(row))] for row in rows]
    masks = np.tril(np.ones([len(rows), 1, width, width], dtype=bool))
    batch = {
        "input_ids": padded(texts, width, 0),
        "position_ids": padded(positions, width, 0),
        "chosen_labels": padded([[0] * 2 + row[2:] for row in rows], width, 0),
        "rejected_labels": padded([[0] * len(row) + row[2:] for row in rows], width, 0),
        "response_indexs": np.array(indexes, dtype="int64"),
        "attention_mask": masks,
    }
    return {name: paddle.to_tensor(value) for name, value in batch.items()}


class Recount:
    """Counts with plain Python loops over plain lists."""

    def __init__(self):
        self.pending = dict.fromkeys(("computed", "valid", "trained"), 0)

    def batch(self, inputs):
        lists = {name: value.tolist() for name, value in inputs.items()}
        for name, ids in lists.items():
            if name.endswith("input_ids"):
                for row in ids:
                    for token in row:
                        self.pending["computed"] += 1
                        self.pending["valid"] += token != (0 if CASE["batches"] == "dpo" else PAD)
            elif name.endswith("labels"):
                for row in ids:
                    for label in row:
                        self.pending["trained"] += label != (0 if CASE["batches"] == "dpo" else IGNORED)


recount = Recount()
spent = {"eval": 0.0, "checkpoint": 0.0}


class Recounting(trainers.Trainer):
    def evaluate(self, *args, **kwargs):
        begin = time.monotonic()
        result = super().evaluate(*args, **kwargs)
        spent["eval"] += time.monotonic() - begin
        return result

    def _save_checkpoint(self, *args, **kwargs):
        begin = time.monotonic()
        super()._save_checkpoint(*args, **kwargs)
        spent["checkpoint"] += time.monotonic() - begin

    def training_step(self, model, inputs, *args, **kwargs):
        recount.batch(inputs)
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False):
        if CASE["batches"] != "pairs":
            return super().compute_loss(model, inputs, return_outputs)
        scores = []
        for name in ("chosen", "rejected"):
            outputs = model(inputs[f"{name}_input_ids"], attention_mask=inputs[f"{name}_attention_mask"])
            scores.append(F.cross_entropy(logits_of(outputs), inputs[f"{name}_labels"], ignore_index=IGNORED))
        return F.softplus(scores[0] - scores[1])


class Script(trainers.TrainerCallback):
    """What this script does at a Trainer's events."""

    def on_train_begin(self, args, state, control, **kwargs):
        spent["began"] = time.monotonic()
        if CASE["mlflow"]:
            mlflow.start_run()

    def on_step_end(self, args, state, control, **kwargs):
        print("STEP", json.dumps({"step": state.global_step, **recount.pending}), flush=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        print("LOG", state.global_step, repr(logs.get("loss")), flush=True)
        if CASE["mlflow"] and "loss" in logs:
            mlflow.log_metrics({"loss": logs["loss"]}, step=state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        if CASE["hang_after"] == state.global_step:
            threading.Event().wait()

    def on_train_end(self, args, state, control, **kwargs):
        spent["train"] = time.monotonic() - spent["began"] - spent["eval"] - spent["checkpoint"]
        if CASE["mlflow"]:
            mlflow.end_run()


def logits_of(outputs):
    return outputs[0] if isinstance(outputs, tuple) else outputs


def criterion_of(config):
    kind = CASE["criterion"]
    if kind == "function":
        return lambda outputs, labels: F.cross_entropy(logits_of(outputs), labels, ignore_index=IGNORED)
    if kind == "layer":
        layer = paddle.nn.CrossEntropyLoss(ignore_index=IGNORED)
        return lambda outputs, labels: layer(logits_of(outputs), labels)
    if kind == "pieces":
        return Pieces()
    if kind == "library" and FORMERS:
        from paddleformers.nn.criterion.interface import CriterionLayer

        return CriterionLayer(config, return_tuple=False)
    if kind == "library":
        criterion = transformers.LlamaPretrainingCriterion(config)
        return lambda outputs, labels: criterion(logits_of(outputs), labels)
    return None


class Pieces(paddle.nn.Layer):
    """A loss that is computed for four positions at a time, to save memory."""

    ignore_index = IGNORED

    def forward(self, outputs, labels):
        logits, total = logits_of(outputs), 0.0
        for begin in range(0, labels.shape[1], 4):
            part = slice(begin, begin + 4)
            total += F.cross_entropy(logits[:, part], labels[:, part], reduction="none").sum()
        return total / max(1, labels.shape[1])


def model_of(arguments):
    pipeline = not FORMERS and arguments.pipeline_parallel_degree > 1
    values = {"fuse_rms_norm": False}
    if not FORMERS:
        values = {
            "use_flash_attention": False,
            "tensor_parallel_degree": arguments.tensor_parallel_degree,
            "tensor_parallel_rank": arguments.tensor_parallel_rank,
        }
    if CASE["fused"]:
        values |= {"use_fused_head_and_loss_fn": True, "loss_subbatch_sequence_length": 4}
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2 if pipeline else 1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        **values,
    )
    model = (transformers.LlamaForCausalLMPipe if pipeline else transformers.LlamaForCausalLM)(config)
    if CASE["lora"]:
        peft = importlib.import_module(CASE["library"] + ".peft")
        adapted = peft.LoRAConfig(target_modules=[".*q_proj.*", ".*v_proj.*"], r=2, lora_alpha=4)
        model = peft.LoRAModel(model, adapted)
        model.mark_only_lora_as_trainable()
    return model, config


def tokenizer_of():
    if CASE["tokenizer"] is None:
        return None
    from tokenizers import Tokenizer, models

    words = WORDS | {f"w{number}": number for number in range(4, VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    name = "PreTrainedTokenizerFast" if FORMERS else "PretrainedTokenizerFast"
    return getattr(transformers, name)(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token=CASE["tokenizer"]
    )


def arguments_of():
    values = {
        "output_dir": "out",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 4,
        "logging_steps": 1,
        "save_steps": 1000,
        "report_to": [],
        "disable_tqdm": True,
        "device": "cpu",
        "learning_rate": 1e-3,
        "seed": 7,
    }
    if FORMERS:
        values["amp_master_grad"] = False
    return trainers.TrainingArguments(**{**values, **CASE["arguments"]})


def trainer_of(callbacks):
    arguments = arguments_of()
    paddle.seed(7)
    model, config = model_of(arguments)
    values = {
        "model": model,
        "args": arguments,
        "train_dataset": Rows(rows_of(CASE["rows"], 1)),
        "eval_dataset": Rows(rows_of(6, 2)),
        "data_collator": collate,
        "tokenizer": tokenizer_of(),
        "callbacks": callbacks,
    }
    if CASE["batches"] == "dpo":
        return dpo_trainer(values)
    return Recounting(criterion=criterion_of(config), **values)


def dpo_trainer(values):
    from types import SimpleNamespace

    from paddlenlp.trl import DPOTrainer

    class RecountingDPO(DPOTrainer):
        def training_step(self, model, inputs, *args, **kwargs):
            recount.batch(inputs)
            return super().training_step(model, inputs, *args, **kwargs)

    settings = SimpleNamespace(
        loss_type="sigmoid",
        reference_free=True,
        lora=False,
        beta=0.1,
        label_smoothing=0.0,
        pref_loss_ratio=1.0,
        sft_loss_ratio=0.0,
        ref_model_update_steps=-1,
    )
    return RecountingDPO(dpo_config=settings, **values)


def main():
    ours = []
    if CASE["install"] == "callback":
        ours = [mlflow_tokens.TrainerCallback(**CASE["options"])]
    trainer = trainer_of([Script(), *ours])
    if CASE["install"] == "added":
        trainer.add_callback(mlflow_tokens.TrainerCallback(**CASE["options"]))
    for number in range(CASE["trainings"]):
        # After the first one it goes on from where that had got to at half time.
        trainer.train(resume_from_checkpoint=CASE["resume"] if number == CASE["trainings"] - 1 else None)
    print("SPENT", json.dumps(spent))
    print("RANDOM", repr(float(paddle.rand([1]))), flush=True)


main()
