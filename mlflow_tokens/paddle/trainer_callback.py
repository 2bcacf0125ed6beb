"""`TrainerCallback`: autolog for one training of a PaddleNLP or PaddleFormers Trainer, put in by hand."""

from __future__ import annotations

import inspect
import os
from typing import Any

from mlflow_tokens.options import check_options
from mlflow_tokens.paddle import autolog as hooks


class TrainerCallback:
    """Logs tokens, tokens/s and cost of one Trainer: `Trainer(..., callbacks=[TrainerCallback(price=…)])`.

    From the moment the Trainer is made until its training ends it does what `mlflow_tokens.autolog` does
    for the whole script; where that is on, it leaves everything to it. Put it in on every rank.

    Args:
        options: as for `mlflow_tokens.autolog`, but `disable`.

    Raises:
        TypeError: there is no such option.
        ValueError: an option cannot be used; the message says what can.
    """

    def __init__(self, **options: Any) -> None:
        parameters = inspect.signature(hooks.autolog).parameters
        defaults = {name: each.default for name, each in parameters.items() if name != "disable"}
        if unknown := options.keys() - defaults.keys():
            raise TypeError(f"{', '.join(sorted(unknown))}: no option of {', '.join(defaults)}")
        stated = {**defaults, **options}
        hooks.check_models(stated.pop("model"))
        check_options(**stated, environ=os.environ)
        self._options = options
        self._installed = False

    def on_init_end(self, *_args: Any, **_kwargs: Any) -> None:
        """The Trainer is made: put the hooks in."""
        self._install()

    def on_train_begin(self, args: Any, state: Any, *_args: Any, **kwargs: Any) -> None:
        """Training begins, maybe once more, or with a Trainer that was made without this callback."""
        self._install()
        hooks.train_begins(args, state, kwargs.get("model"), kwargs.get("tokenizer"))

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
