"""`TrainerCallback`: autolog for one training of a PaddleNLP or PaddleFormers Trainer, put in by hand."""

from __future__ import annotations

import os
from typing import Any

from mlflow_tokens.options import check_options
from mlflow_tokens.paddle import autolog as hooks
from mlflow_tokens.pricing import Price


class TrainerCallback:
    """Logs tokens, tokens/s and cost of one Trainer: `Trainer(..., callbacks=[TrainerCallback(price=…)])`.

    From the moment the Trainer is made until its training ends it does what `mlflow_tokens.autolog` does
    for the whole script; where that is on, it leaves everything to it. Put it in on every rank.

    Args: as for `mlflow_tokens.autolog`.

    Raises:
        ValueError: an option cannot be used; the message says what can.
    """

    def __init__(
        self,
        *,
        price: str | Price | None = None,
        log_every_steps: int = 10,
        pad_token_id: int | None = None,
        pad: str | None = None,
        ignore_index: int = -100,
        visualdl: str | os.PathLike[str] | None = None,
        jsonl: str | os.PathLike[str] | None = None,
        journal_dir: str | os.PathLike[str] | None = None,
        bill_gaps: bool = False,
        silent: bool = False,
    ) -> None:
        self._options: dict[str, Any] = {
            "price": price,
            "log_every_steps": log_every_steps,
            "pad_token_id": pad_token_id,
            "pad": pad,
            "ignore_index": ignore_index,
            "visualdl": visualdl,
            "jsonl": jsonl,
            "journal_dir": journal_dir,
            "bill_gaps": bill_gaps,
            "silent": silent,
        }
        check_options(**self._options, environ=os.environ)
        self._installed = False

    def on_init_end(self, *_args: Any, **_kwargs: Any) -> None:
        """The Trainer is made: put the hooks in."""
        self._install()

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """Training begins, maybe once more, or with a Trainer that was made without this callback."""
        self._install()

    def on_train_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Training has ended: write the last snapshot and take the hooks out."""
        if self._installed:
            self._installed = False
            hooks.autolog(disable=True)

    def __getattr__(self, name: str) -> Any:
        # The Trainers call every event by its name, and each version has some that others have not.
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(name)

    def _install(self) -> None:
        if not hooks.is_installed():
            hooks.autolog(**self._options)
            self._installed = True


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None
