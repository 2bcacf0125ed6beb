"""PaddleNLP's and PaddleFormers' Trainer: what the hooks for raw loops cannot see of it.

They count its batches and its steps. Seen here are its logging steps, its checkpoints and where it goes
on from, evaluation and saving, and what it knows about padding and labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import paddle
from mlflow.utils.import_hooks import register_post_import_hook

from mlflow_tokens.counting import BatchCounts, count_labels, is_array
from mlflow_tokens.files import write_json
from mlflow_tokens.notices import say_once
from mlflow_tokens.paddle.model_hooks import ModelHooks
from mlflow_tokens.paddle.pad_id import ignore_index_of, pad_id_of
from mlflow_tokens.patches import Patches
from mlflow_tokens.tracker import Tracker

#: Lies in every checkpoint-N directory; the Trainers leave files alone that they do not know.
SIDECAR = "mlflow_tokens.json"
_MODULES = ("paddlenlp.trainer.trainer", "paddleformers.trainer.trainer")

_active: TrainerHooks | None = None


class TrainerHooks:
    """Tells the tracker what a Trainer does, once the script has imported one."""

    def __init__(self, tracker: Tracker, models: ModelHooks) -> None:
        self._tracker = tracker
        self._models = models
        self._stated = tracker.options.pad_policy
        self._criterion: Any = None
        self._announced = False
        self._patches = Patches()

    def install(self) -> None:
        """Wrap the Trainers that are imported, and those that will be; import none."""
        global _active
        _active = self
        for name in _MODULES:
            register_post_import_hook(_trainer_imported, name)

    def remove(self) -> None:
        """Put everything back."""
        global _active
        _active = None
        self._patches.revert()

    def wrap(self, module: Any) -> None:
        """Wrap the Trainer of a module."""
        trainer = module.Trainer
        self._patches.wrap(trainer, "train", self._train)
        self._patches.wrap(module.CallbackHandler, "call_event", self._call_event)
        for name in ("evaluate", "predict"):
            self._patches.wrap(trainer, name, self._evaluate)
        for name in ("_save_checkpoint", "save_model"):
            if name in vars(trainer):
                self._patches.wrap(trainer, name, self._save)

    # ---- what the Trainer calls -------------------------------------------------------------------

    def _train(self, original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        resumed = kwargs.get("resume_from_checkpoint", args[0] if args else None)
        self._safely(self._training_announced, trainer, resumed)
        try:
            return original(trainer, *args, **kwargs)
        finally:
            self._announced, self._criterion = False, None

    def _evaluate(self, original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with self._tracker.phase("eval"):
            return original(trainer, *args, **kwargs)

    def _save(self, original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with self._tracker.phase("checkpoint"):
            return original(trainer, *args, **kwargs)

    def _call_event(self, original: Any, handler: Any, event: str, *args: Any, **kwargs: Any) -> Any:
        if event == "on_load_data_end":
            self._safely(self._batch_loaded, kwargs.get("inputs"))
        result = original(handler, event, *args, **kwargs)
        if event == "on_log":
            self._safely(self._logged, *args)
        elif event == "on_save":
            self._safely(self._saved, *args)
        elif event == "on_train_end":
            self._safely(self._train_ends)
        return result

    def _safely(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            say_once("trainer", "Something that the Trainer does could not be followed: %r", error)

    # ---- what is made of it -----------------------------------------------------------------------

    def _training_announced(self, trainer: Any, resumed: Any) -> None:
        self._announced = True
        self._criterion = getattr(trainer, "criterion", None)
        owners = (trainer, getattr(trainer, "data_collator", None))
        names = ("tokenizer", "processing_class")
        tokenizers = [getattr(owner, name, None) for owner in owners for name in names]
        self._learn(next(filter(None, tokenizers), None), getattr(trainer, "model", None))
        # Weights alone begin something new.
        if resumed and not getattr(trainer.args, "ignore_load_lr_and_optim", False):
            self._resume(Path(resumed))

    def train_begins(self, args: Any, state: Any, model: Any, tokenizer: Any) -> None:
        """A callback of ours is told that training begins, which may have put the hooks in only now."""
        if not self._announced:
            self._announced = True
            self._safely(self._learn, tokenizer, model)
            if state.global_step:
                named = getattr(args, "resume_from_checkpoint", None)
                directory = Path(named) if isinstance(named, str) else _directory(args, state)
                self._safely(self._resume, directory)

    def _train_ends(self) -> None:
        self._announced = False
        self._models.refine = None
        self._tracker.meter.clock.switch("other")

    def _resume(self, directory: Path) -> None:
        sidecar = directory / SIDECAR
        if sidecar.is_file():
            self._tracker.load_state_dict(json.loads(sidecar.read_text("utf-8")))

    def _logged(self, _args: Any, state: Any, _control: Any) -> None:
        self._tracker.runs.script_logged(None, state.global_step)

    def _saved(self, args: Any, state: Any, _control: Any) -> None:
        # Of all nodes that save, only that of global rank 0 knows the run.
        if self._tracker.meter.rank == 0:
            write_json(_directory(args, state) / SIDECAR, self._tracker.state_dict())

    def _learn(self, tokenizer: Any, model: Any) -> None:
        """Take over what is known about padding and labels, unless the user has stated it."""
        stated = self._stated
        config = getattr(model, "config", None)
        policy = stated
        if stated.pad_token_id is None and not stated.none:
            policy = replace(policy, pad_token_id=pad_id_of(tokenizer, config))
        if stated.ignore_index == -100 and (index := ignore_index_of(config)) is not None:
            policy = replace(policy, ignore_index=index)
        self._tracker.learn(policy)

    def _batch_loaded(self, batch: Any) -> None:
        """A batch goes into the model next, unless it is skipped: keep at hand what it trains on."""
        self._models.refine = None
        if not isinstance(batch, Mapping):
            return
        labels, responses = batch.get("labels"), batch.get("response_indexs")
        ignore_index = ignore_index_of(self._criterion)
        if is_array(responses):
            pairs = "response_kl_labels" not in batch
            self._models.refine = lambda counts: _with_responses(counts, responses if pairs else None)
        elif is_array(labels) and ignore_index is not None:
            # They go into the criterion, which may look at them in pieces, or at some of them only.
            self._models.refine = lambda counts: _with_labels(counts, labels, ignore_index)


def _trainer_imported(module: Any) -> None:
    """A module with a Trainer is complete."""
    if _active is None:
        return
    try:
        _active.wrap(module)
    except Exception as error:
        say_once("trainer", "The Trainer of %s cannot be followed: %r", module.__name__, error)


def _with_labels(counts: BatchCounts, labels: Any, ignore_index: int) -> BatchCounts:
    if counts.trained is not None:
        return counts
    with paddle.no_grad():
        return counts._replace(trained=count_labels(labels, ignore_index, counts.label_sizes))


def _with_responses(counts: BatchCounts, pairs: Any) -> BatchCounts:
    """Trained are the tokens of chosen and rejected responses.

    The loss is given labels that are 0 outside of responses, an id like others. Of every pair of responses
    a row says where it is: (row of the batch, begin of the chosen response, its end and the begin of the
    rejected one, the end of that).

    pairs: None where there are no pairs (KTO): unknown.
    """
    if pairs is None:
        return counts._replace(trained=None, label_sizes=frozenset())
    pairs = pairs.reshape([-1, pairs.shape[-1]])
    with paddle.no_grad():
        return counts._replace(trained=(pairs[:, 3] - pairs[:, 1]).astype("int64").sum())


def _directory(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
