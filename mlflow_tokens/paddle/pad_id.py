"""What a tokenizer or a model's configuration says about padding, where it is knowledge and no default."""

from __future__ import annotations

from typing import Any

#: Special tokens that stand in text as well: an id that is one of them does not tell padding from text.
_IN_TEXT = ("eos_token_id", "bos_token_id", "sep_token_id", "cls_token_id", "mask_token_id")


def pad_id_of(tokenizer: Any, config: Any) -> int | None:
    """The id that means padding and nothing else; None where nobody has said so.

    tokenizer: its pad token counts if it has one that is no token of the text, such as the end of a text.
    config: a model's. Its default of 0 is no knowledge, nor is the id of the end of a text.
    """
    pad = _integer(tokenizer, "pad_token_id")
    # A tokenizer without a pad token may well answer with an id, and complain.
    if pad is not None and getattr(tokenizer, "pad_token", None) is not None:
        return None if _is_in_text(pad, tokenizer) else pad
    pad = _integer(config, "pad_token_id")
    return None if not pad or _is_in_text(pad, config) else pad


def ignore_index_of(owner: Any) -> int | None:
    """The label that a criterion or a model's configuration leaves out of the loss; None if it names none."""
    index = _integer(owner, "ignore_index")
    return _integer(owner, "ignored_index") if index is None else index


def _is_in_text(pad: int, owner: Any) -> bool:
    """Whether text may hold this id, or nothing can: a configuration may say -1."""
    return pad < 0 or any(pad in _ids(getattr(owner, name, None)) for name in _IN_TEXT)


def _ids(value: Any) -> tuple[Any, ...]:
    """A configuration may name several ends of a text."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _integer(owner: Any, name: str) -> int | None:
    value = getattr(owner, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
