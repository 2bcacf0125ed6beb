"""What a token is: the counting of one batch.

Works on anything that has `shape` and `dtype` and can be compared and summed: Paddle tensors, NumPy
arrays. Sums stay on the device as 0-d arrays; nothing here reads device memory.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlflow_tokens.masks import by_diagonal, by_masked_rows, by_position, count_where

#: A count that may still be on the device: an int, or a 0-d integer array.
Scalar = Any

_IDS = ("input_ids", "decoder_input_ids")
_IDS_NAMES = ("src_ids", "token_ids", "tokens", "ids")
_IDS_ALIASES = (*_IDS_NAMES, "src", "x", "input", "inputs")
_MASKS = ("attention_mask", "padding_mask")
_LABELS = ("labels", "label", "target_ids", "targets", "lm_labels", "target", "y")
_NOT_IDS = (
    "t timesteps position_ids token_type_ids segment_ids task_type_ids seq_lens lengths cu_seqlens "
    "loss_mask attn_mask decoder_attention_mask attn_mask_startend_row_indices startend_row_indices"
)
_NEVER_IDS = frozenset((*_MASKS, *_LABELS, *_NOT_IDS.split()))
_INTEGERS = ("int64", "int32", "int16")


@dataclass(frozen=True, slots=True)
class PadPolicy:
    """How padding is told from text.

    pad_token_id: the id that means padding, as the user states it; a default of 0 is not knowledge.
    none: the user states that there is no padding (packed data).
    ignore_index: the label that is not trained on, for labels that go into the model.
    """

    pad_token_id: int | None = None
    none: bool = False
    ignore_index: int = -100

    def __str__(self) -> str:
        if self.none:
            return "no padding (stated)"
        return "mask" if self.pad_token_id is None else f"mask, else id != {self.pad_token_id}"


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Tokens of one micro-batch; None means unknown, and `reason` says why."""

    computed: Scalar | None
    valid: Scalar | None
    trained: Scalar | None
    label_sizes: frozenset[int] = frozenset()
    """How many labels a token-level loss over this batch may be given: one a position, or one less a row."""
    reason: str | None = None
    rows: int | None = None
    width: int | None = None
    """The shape of the ids, where they have rows."""
    lengths: Any = None
    """Valid tokens of each row, an array on the device; only where it was asked for."""
    by_square: tuple[int, Scalar] | None = None
    """Positions whose padding is told by masks of query by key, and how many of them those call text.

    Such masks need not tell padding: while they call every position text, it is not known whether they do.
    """
    by_source: Mapping[str, tuple[Scalar | None, Scalar | None]] = field(default_factory=dict)
    """Computed and valid tokens of each data source that was named."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The arrays of a batch that counting looks at."""

    ids: tuple[Any, ...] = ()
    mask: Any = None
    decoder_mask: Any = None
    labels: Any = None
    startend: Any = None
    """Flashmask: of each key, from which query on it is masked, or between which."""


def count_batch(fields: Fields, policy: PadPolicy, *, by_row: bool = False) -> BatchCounts:
    """Count the tokens of one micro-batch.

    computed: all positions of all ids, padding included.
    valid: the mask's, else those whose id is not the stated pad id, else unknown.
    trained: labels != ignore_index; unknown while no labels are seen.

    by_row: give the valid tokens of each row as well, of the first ids (an encoder's).
    """
    if not fields.ids:
        return BatchCounts(None, None, None, reason="no token ids were recognised in the batch")
    sizes = [size(ids) for ids in fields.ids]
    label_sizes = frozenset(
        candidate
        for ids, total in zip(fields.ids, sizes, strict=True)
        for candidate in _label_sizes(ids, total)
    )
    trained: Scalar | None = None
    if fields.labels is not None:
        trained = count_labels(fields.labels, policy.ignore_index, label_sizes)
    valid: Scalar | None = 0
    reason = lengths = rows = width = by_square = None
    if len(fields.ids[0].shape) == 2:
        rows, width = fields.ids[0].shape
    for index, (ids, total) in enumerate(zip(fields.ids, sizes, strict=True)):
        rowwise = by_row and index == 0 and rows is not None
        mask, startend = (fields.decoder_mask, None) if index else (fields.mask, fields.startend)
        part: Scalar | None = total
        square = False
        if total and not policy.none:
            part, square = _valid(ids, mask, startend, policy, rowwise)
        if part is None:
            valid, lengths, reason = None, None, _unreadable(mask, startend)
            break
        if rowwise and is_array(part):
            lengths, part = part, part.sum()
        if square:
            by_square = (total, part) if by_square is None else (by_square[0] + total, by_square[1] + part)
        valid = valid + part
    return BatchCounts(sum(sizes), valid, trained, label_sizes, reason, rows, width, lengths, by_square)


def read_scalar(value: Scalar | None) -> int | None:
    """The number; None where it is unknown, as one below 0 says (see `masks`).

    Reads device memory: not for the training thread.
    """
    return None if value is None or (number := int(value)) < 0 else number


def given_counts(computed: Any, valid: Any, trained: Any) -> BatchCounts:
    """Counts that somebody states; None where nothing is said.

    Raises:
        ValueError, TypeError: not a whole number of tokens, or more valid or trained tokens than computed.
    """
    counts = {"computed": computed, "valid": valid, "trained": trained}
    known = {name: _whole(name, value) for name, value in counts.items() if value is not None}
    most = known.get("computed")
    for name, value in known.items():
        if isinstance(most, int) and isinstance(value, int) and value > most:
            raise ValueError(f"{name}={value} tokens are more than the computed={most}")
    return BatchCounts(
        known.get("computed"),
        known.get("valid"),
        known.get("trained"),
        reason="the counts given leave it out",
    )


def _whole(name: str, value: Any) -> Scalar:
    """An int; a tensor of one integer stays on its device, where its value is not looked at."""
    if _is_integer(value) and size(value) == 1 and not _is_on_host(value):
        return value.reshape([])
    if isinstance(value, bool) or (number := operator.index(value)) < 0:
        raise ValueError(f"{name}={value!r} is not a number of tokens")
    return number


def count_labels(labels: Any, ignore_index: int, label_sizes: Iterable[int]) -> Scalar | None:
    """Labels that are trained on; None when there is not one label a token (a class a row, soft labels)."""
    if not _is_integer(labels) or size(labels) not in label_sizes:
        return None
    return (labels != ignore_index).sum() if size(labels) else 0


def find_fields(arguments: Any, names: tuple[str, ...] = ()) -> Fields:
    """Find ids, mask and labels in what a model was called with.

    Args:
        arguments: a mapping, an array, or a sequence of those, as a loader or a caller hands them over.
        names: parameter names of the positional part, where the callee's signature tells them.
    """
    named: dict[str, Any] = {}
    unnamed: list[Any] = []
    for name, value in _flatten(arguments, names):
        if name is None:
            unnamed.append(value)
        else:
            named.setdefault(name, value)
    ids = tuple(named[name] for name in _IDS if _is_ids(named.get(name)))
    if not ids:
        candidates = [named.get(name) for name in _IDS_ALIASES]
        candidates += unnamed
        candidates += [value for name, value in named.items() if name not in _NEVER_IDS]
        ids = tuple(
            value for value in candidates if value is not None and _is_ids(value) and len(value.shape) == 2
        )[:1]
        # A flat batch is told from a class a row or a time step by its name alone.
        ids = ids or tuple(named[name] for name in _IDS_NAMES if _is_ids(named.get(name)))[:1]
    return Fields(
        ids=ids,
        mask=_first(named, _MASKS),
        decoder_mask=_first(named, ("decoder_attention_mask",)),
        labels=_first(named, _LABELS),
        startend=_first(named, ("attn_mask_startend_row_indices", "startend_row_indices")),
    )


def size(array: Any) -> int:
    """Number of elements, from the shape alone."""
    return math.prod(array.shape)


def is_array(value: Any) -> bool:
    """Whether this is a tensor or an array rather than a container, a number or text."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _flatten(
    value: Any, names: tuple[str, ...] = (), name: str | None = None, depth: int = 0
) -> Iterator[tuple[str | None, Any]]:
    if is_array(value):
        yield name, value
    elif depth > 3:
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, (), key if isinstance(key, str) else None, depth + 1)
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", names)
        for index, item in enumerate(value):
            yield from _flatten(item, (), names[index] if index < len(names) else None, depth + 1)


def _is_on_host(value: Any) -> bool:
    return type(value).__module__ == "numpy"


def _is_integer(value: Any) -> bool:
    return is_array(value) and _dtype(value) in _INTEGERS


def _dtype(array: Any) -> str:
    return str(array.dtype).rpartition(".")[2]


def _is_ids(value: Any, dimensions: tuple[int, ...] = (1, 2)) -> bool:
    return _is_integer(value) and len(value.shape) in dimensions


def _first(named: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((named[name] for name in names if named.get(name) is not None), None)


def _label_sizes(ids: Any, total: int) -> frozenset[int]:
    """One label a position, or one less a row; as many as there are rows may be a class a row."""
    if len(ids.shape) != 2 or total == 0:
        return frozenset((total, max(0, total - 1)))
    rows = ids.shape[0]
    return frozenset((total, total - rows)) - {rows}


def _valid(ids: Any, mask: Any, startend: Any, policy: PadPolicy, by_row: bool) -> tuple[Scalar | None, bool]:
    """Valid tokens, all in one or of each row, or None; and whether a mask of query by key tells them."""
    shape = list(ids.shape)
    readable = is_array(mask) and _dtype(mask).startswith(("bool", "int", "uint", "float", "bfloat"))
    if readable and (text := by_position(mask, shape, by_row)) is not None:
        return text, False
    if policy.pad_token_id is not None:
        return count_where(ids != policy.pad_token_id, shape, by_row), False
    if readable and (text := by_diagonal(mask, shape, by_row)) is not None:
        return text, True
    if _is_integer(startend) and (text := by_masked_rows(startend, shape, by_row)) is not None:
        return text, True
    return None, False


def _unreadable(mask: Any, startend: Any) -> str:
    for name, array in (("an attention mask", mask), ("attn_mask_startend_row_indices", startend)):
        if is_array(array):
            shape = "x".join(map(str, array.shape))
            told = f"{name} of {_dtype(array)} and shape {shape}"
            return f"{told} does not tell padding from text; state pad_token_id=…"
    return 'there is no attention mask; state pad_token_id=…, or pad="none" for packed data'
