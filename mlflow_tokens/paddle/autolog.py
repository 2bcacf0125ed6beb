"""`autolog()`: everything that counts, put into a script by one line and taken out by another."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

try:
    import paddle
except ImportError as error:
    raise ImportError(
        "mlflow_tokens.autolog() needs PaddlePaddle: pip install paddlepaddle for CPUs; builds for GPUs and "
        "other accelerators come from PaddlePaddle's own index, see https://www.paddlepaddle.org.cn/install. "
        "Without Paddle, count by hand with mlflow_tokens.Tracker."
    ) from error
from mlflow.utils.autologging_utils import AUTOLOGGING_INTEGRATIONS, autologging_integration
from paddle.nn import Layer

from mlflow_tokens.options import check_options
from mlflow_tokens.paddle.checkpoint_hooks import CheckpointHooks
from mlflow_tokens.paddle.graph_hooks import GraphHooks
from mlflow_tokens.paddle.loss_hooks import LossHooks
from mlflow_tokens.paddle.model_hooks import ModelHooks
from mlflow_tokens.paddle.moe_hooks import MoeHooks
from mlflow_tokens.paddle.offload import Offload
from mlflow_tokens.paddle.pipeline_hooks import PipelineHooks
from mlflow_tokens.paddle.reader_hooks import ReaderHooks
from mlflow_tokens.paddle.save_hooks import SaveHooks
from mlflow_tokens.paddle.step_hooks import StepHooks, optimizer_classes
from mlflow_tokens.paddle.trainer_hooks import TrainerHooks
from mlflow_tokens.pricing import Price
from mlflow_tokens.script_hooks import ScriptHooks
from mlflow_tokens.tracker import Tracker

INTEGRATION = "mlflow_tokens"

_installed: _Hooks | None = None


def autolog(
    *,
    price: str | os.PathLike[str] | Price | None = None,
    log_every_steps: int = 10,
    pad_token_id: int | None = None,
    pad: str | None = None,
    ignore_index: int = -100,
    source_key: str | None = None,
    model: Layer | Sequence[Layer] | None = None,
    visualdl: str | os.PathLike[str] | None = None,
    jsonl: str | os.PathLike[str] | None = None,
    journal_dir: str | os.PathLike[str] | None = None,
    bill_gaps: bool = False,
    disable: bool = False,
    silent: bool = False,
) -> Tracker | None:
    """Log tokens, tokens/s and cost of every PaddlePaddle training loop from here on.

    Call it once on every rank, before training; the script needs no other change. It finds the model
    that the optimizer trains, counts the batches it is fed and the labels its loss is given, and logs
    snapshots to the MLflow run that is active at the first of them (one is started if there is none)
    and to VisualDL, from global rank 0 alone. `mlflow.autolog(disable=True)` turns it off as well.

    Every model that is trained counts, if it is fed token ids: of a generator and a discriminator those that
    are, a teacher not. A step is an update that follows a new batch of tokens.

    Args:
        model: count this model alone, or these (`paddle.nn.Layer`), whatever else is trained: an actor and
            not its critic. The layer that is given token ids, or one around it.
        disable: take every hook out again; the last snapshot is written first.
        price, log_every_steps, pad_token_id, pad, ignore_index, source_key, visualdl, jsonl, journal_dir,
            bill_gaps, silent: as for `mlflow_tokens.Tracker`.

    Returns:
        The tracker; None with `disable=True`.

    Raises:
        ValueError: an option cannot be used; the message says what can.
        TypeError: `model` is no `paddle.nn.Layer`.
        ImportError: `visualdl` is given and VisualDL is not installed.
    """
    options: dict[str, Any] = {
        "price": price,
        "log_every_steps": log_every_steps,
        "pad_token_id": pad_token_id,
        "pad": pad,
        "ignore_index": ignore_index,
        "source_key": source_key,
        "visualdl": visualdl,
        "jsonl": jsonl,
        "journal_dir": journal_dir,
        "bill_gaps": bill_gaps,
        "silent": silent,
    }
    check_options(**options, environ=os.environ)
    models = check_models(model)
    _uninstall()
    # MLflow's decorator keeps the configuration and calls the function unless disable is set.
    tracker: Tracker | None = _autolog(disable=disable, **options)
    # MLflow would keep the models alive, were they among the options.
    if _installed is not None and models:
        _installed.count_only(models)
    return tracker


@autologging_integration(INTEGRATION)  # type: ignore[untyped-decorator]
def _autolog(disable: bool = False, silent: bool = False, **options: Any) -> Tracker:
    global _installed
    tracker = Tracker(silent=silent, **options)
    _installed = _Hooks(tracker)
    _installed.install()
    return tracker


def is_installed() -> bool:
    """Whether the hooks of an `autolog()` are in."""
    return _installed is not None


def train_begins(args: Any, state: Any, model: Any, tokenizer: Any) -> None:
    """Say what a Trainer's callback is told when training begins."""
    if _installed is not None:
        _installed.trainers.train_begins(args, state, model, tokenizer)


def check_models(model: Any) -> list[Layer]:
    """The models that a user has named.

    Raises:
        TypeError: something that is no layer.
        ValueError: nothing in it can be trained.
    """
    if model is None:
        return []
    models = list(model) if isinstance(model, list | tuple | set | frozenset) else [model]
    for layer in models:
        if not isinstance(layer, Layer):
            hint = "; of a paddle.Model it is .network" if isinstance(layer, paddle.Model) else ""
            raise TypeError(
                f"model=… must be the paddle.nn.Layer that is trained, or a list of them{hint}, "
                f"not a {type(layer).__module__}.{type(layer).__qualname__}"
            )
        if all(parameter.stop_gradient for parameter in layer.parameters()):
            raise ValueError(f"model=… names a {type(layer).__name__} with no parameter that can be trained")
    if not models:
        raise ValueError("model=… is empty; leave it out to count every model that is trained")
    return models


def _uninstall() -> None:
    global _installed
    if _installed is not None:
        hooks, _installed = _installed, None
        hooks.remove()


class _Hooks:
    """All hooks of one `autolog()`."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._mlflow_config = AUTOLOGGING_INTEGRATIONS.get("mlflow")
        self._models = ModelHooks(tracker, optimizer_classes())
        self._losses = LossHooks(tracker, self._models)
        self._graphs = GraphHooks(tracker, self._models)
        self._gates = MoeHooks(tracker, self._models)
        self._steps = StepHooks(tracker, self._models, self._obey_mlflow)
        self._checkpoints = CheckpointHooks(tracker)
        self._pipelines = PipelineHooks(tracker, self._models)
        self._readers = ReaderHooks(tracker)
        self._saves = SaveHooks(tracker)
        self.trainers = TrainerHooks(tracker, self._models)
        self._script = ScriptHooks(tracker)
        tracker.meter.to_host = Offload().to_host

    def install(self) -> None:
        self._models.install()
        self._losses.install()
        self._graphs.install()
        self._steps.install()
        self._checkpoints.install()
        self._pipelines.install()
        self._readers.install()
        self._saves.install()
        self.trainers.install()
        self._script.install()

    def count_only(self, models: Sequence[Layer]) -> None:
        self._models.count_only(models)

    def remove(self) -> None:
        self._models.remove()
        self._losses.remove()
        self._graphs.remove()
        self._gates.remove()
        self._steps.remove()
        self._checkpoints.remove()
        self._pipelines.remove()
        self._readers.remove()
        self._saves.remove()
        self.trainers.remove()
        self._script.remove()
        self._tracker.close()

    def _obey_mlflow(self) -> None:
        """Turn off when the script has called `mlflow.autolog(disable=True)` since.

        MLflow calls the integrations it knows by a fixed list. For the others it leaves what it was
        called with in its registry, in a new mapping at each call.
        """
        config = AUTOLOGGING_INTEGRATIONS.get("mlflow")
        if config is not self._mlflow_config:
            self._mlflow_config = config
            if config and config.get("disable"):
                autolog(disable=True)
