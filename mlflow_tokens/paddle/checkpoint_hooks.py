"""A small file of ours beside every checkpoint of `paddle.Model`, read again when the checkpoint is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import paddle

from mlflow_tokens.files import write_json
from mlflow_tokens.notices import say_once
from mlflow_tokens.patches import Patches
from mlflow_tokens.tracker import Tracker

SUFFIX = ".mlflow_tokens.json"
#: Endings that `paddle.Model.load` takes off a path.
_ENDINGS = (".pdparams", ".pdopt", ".pdmodel")


class CheckpointHooks:
    """Saves and loads the tracker's state with a model's: hapi's `ModelCheckpoint` saves through it, too."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._patches = Patches()

    def install(self) -> None:
        """Wrap `paddle.Model.save` and `load`."""
        self._patches.wrap(paddle.Model, "save", self._save)
        self._patches.wrap(paddle.Model, "load", self._load)

    def remove(self) -> None:
        """Put everything back."""
        self._patches.revert()

    def _save(self, original: Any, model: Any, path: str, training: bool = True) -> Any:
        result = original(model, path, training)
        # Of all nodes that save, only that of global rank 0 knows the run.
        if training and self._tracker.meter.rank == 0:
            try:
                write_json(_sidecar(path), self._tracker.state_dict())
            except Exception as error:
                say_once("sidecar", "Where checkpoint %s was saved could not be noted: %s", path, error)
        return result

    def _load(
        self, original: Any, model: Any, path: str, skip_mismatch: bool = False, reset_optimizer: bool = False
    ) -> Any:
        result = original(model, path, skip_mismatch, reset_optimizer)
        # Without its optimizer a checkpoint begins something new: fine-tuning, or an evaluation.
        if not reset_optimizer and getattr(model, "_optimizer", None) is not None:
            try:
                sidecar = _sidecar(path)
                if sidecar.is_file():
                    self._tracker.load_state_dict(json.loads(sidecar.read_text("utf-8")))
            except Exception as error:
                say_once("sidecar", "Where checkpoint %s was saved cannot be read: %s", path, error)
        return result


def _sidecar(path: str) -> Path:
    prefix, ending = os.path.splitext(path)
    return Path((prefix if ending in _ENDINGS else path) + SUFFIX)
