"""What a user may ask for, checked where the user can still act on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlflow_tokens.counting import PadPolicy
from mlflow_tokens.journal import DEFAULT_DIRECTORY
from mlflow_tokens.pricing import EXAMPLES, Price, PriceChoice, choose_price


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `autolog` and `Tracker`, valid by construction."""

    price: PriceChoice
    log_every_steps: int
    pad_policy: PadPolicy
    source_key: str | None
    visualdl: Path | None
    jsonl: Path | None
    journal_dir: Path
    bill_gaps: bool
    silent: bool


def check_options(
    *,
    price: str | os.PathLike[str] | Price | None,
    log_every_steps: int,
    pad_token_id: int | None,
    pad: str | None,
    ignore_index: int,
    source_key: str | None,
    visualdl: str | os.PathLike[str] | None,
    jsonl: str | os.PathLike[str] | None,
    journal_dir: str | os.PathLike[str] | None,
    bill_gaps: bool,
    silent: bool,
    environ: Mapping[str, str],
) -> Options:
    """Check what the user passed.

    Raises:
        ValueError: an option cannot be used; the message says what can.
    """
    if not _is_int(log_every_steps) or log_every_steps < 1:
        raise ValueError(
            f"log_every_steps={log_every_steps!r} must be a whole number of optimizer steps, 1 or more"
        )
    if pad not in (None, "none"):
        raise ValueError(f'pad={pad!r} must be "none" (packed data without padding) or left out')
    if pad_token_id is not None and not _is_int(pad_token_id):
        raise ValueError(
            f"pad_token_id={pad_token_id!r} must be the token id, a whole number, or None if unknown"
        )
    if pad == "none" and pad_token_id is not None:
        raise ValueError('pad="none" says that there is no padding; then leave pad_token_id out')
    if not _is_int(ignore_index):
        raise ValueError(f"ignore_index={ignore_index!r} must be a whole number, as in the loss (-100)")
    if source_key is not None and (not isinstance(source_key, str) or not source_key):
        raise ValueError(f"source_key={source_key!r} must be the key of the batch that names its data source")
    return Options(
        price=choose_price(price, environ),
        log_every_steps=log_every_steps,
        pad_policy=PadPolicy(pad_token_id, pad == "none", ignore_index),
        source_key=source_key,
        # Absolute, since the script may change its directory.
        visualdl=Path(visualdl).absolute() if visualdl is not None else None,
        jsonl=Path(jsonl).absolute() if jsonl is not None else None,
        journal_dir=Path(
            journal_dir or environ.get("MLFLOW_TOKENS_JOURNAL_DIR") or DEFAULT_DIRECTORY
        ).absolute(),
        bill_gaps=bool(bill_gaps),
        silent=silent,
    )


def price_advice() -> str:
    """The line that says how to give a price."""
    return f"No price is set, so no cost is logged. Set one with price={EXAMPLES[0]!r} (or {EXAMPLES[2]!r})."


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
