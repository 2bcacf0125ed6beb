"""Times `paddle.save`: seconds in which a checkpoint is written are no training."""

from __future__ import annotations

import sys
import threading
from typing import Any

import paddle

from mlflow_tokens.patches import Patches
from mlflow_tokens.tracker import Tracker

#: Where scripts and Paddle's own modules look it up.
_OWNERS = ("paddle", "paddle.framework", "paddle.framework.io")


class SaveHooks:
    """Charges saving on the main thread to the phase `checkpoint`; another thread holds nobody up."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._patches = Patches()

    def install(self) -> None:
        """Wrap `paddle.save` under all its names, and that of distributed checkpoints."""
        save = paddle.save
        for name in _OWNERS:
            module = sys.modules.get(name)
            if module is not None and vars(module).get("save") is save:
                self._patches.wrap(module, "save", self._save)
        if "save_state_dict" in vars(paddle.distributed):
            self._patches.wrap(paddle.distributed, "save_state_dict", self._save)

    def remove(self) -> None:
        """Put everything back."""
        self._patches.revert()

    def _save(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return original(*args, **kwargs)
        with self._tracker.phase("checkpoint"):
            return original(*args, **kwargs)
