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

#: A count that may still be on the device: an int, or a 0-d integer array.
Scalar = Any

_IDS = ("input_ids", "decoder_input_ids")
_IDS_NAMES = ("src_ids", "token_ids", "tokens", "ids")
_IDS_ALIASES = (*_IDS_NAMES, "src", "x", "input", "inputs")
_MASKS = ("attention_mask", "padding_mask")
_LABELS = ("labels", "label", "target_ids", "targets", "lm_labels", "target", "y")
_NOT_IDS = (
    "t timesteps position_ids token_type_ids segment_ids task_type_ids seq_lens lengths cu_seqlens "
    "loss_mask attn_mask decoder_attention_mask attn_mask_startend_row_indices"
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
    by_source: Mapping[str, tuple[Scalar | None, Scalar | None]] = field(default_factory=dict)
    """Computed and valid tokens of each data source that was named."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The arrays of a batch that counting looks at."""

    ids: tuple[Any, ...] = ()
    mask: Any = None
    decoder_mask: Any = None
    labels: Any = None


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
    masks = (fields.mask, fields.decoder_mask)
    valid: Scalar | None = 0
    reason = lengths = rows = width = None
    if len(fields.ids[0].shape) == 2:
        rows, width = fields.ids[0].shape
    for index, (ids, total) in enumerate(zip(fields.ids, sizes, strict=True)):
        rowwise = by_row and index == 0 and rows is not None
        part, why = _valid(ids, total, masks[min(index, 1)], policy, rowwise)
        if part is None:
            valid, reason = None, why
            break
        if rowwise and is_array(part):
            lengths, part = part, part.sum()
        valid = valid + part
    return BatchCounts(sum(sizes), valid, trained, label_sizes, reason, rows, width, lengths)


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
    if _is_integer(value) and size(value) == 1 and type(value).__module__ != "numpy":
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
        for index, item in enumerate(value):
            yield from _flatten(item, (), names[index] if index < len(names) else None, depth + 1)


def _is_integer(value: Any) -> bool:
    return is_array(value) and str(value.dtype).rpartition(".")[2] in _INTEGERS


def _is_ids(value: Any, dimensions: tuple[int, ...] = (1, 2)) -> bool:
    return _is_integer(value) and len(value.shape) in dimensions


def _first(named: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((named[name] for name in names if named.get(name) is not None), None)


def _label_sizes(ids: Any, total: int) -> tuple[int, int]:
    rows = ids.shape[0] if len(ids.shape) == 2 else 1
    return total, total - rows


Known = tuple[Scalar, None] | tuple[None, str]


def _valid(ids: Any, total: int, mask: Any, policy: PadPolicy, by_row: bool) -> Known:
    """Valid tokens: all in one or, where by_row is set and padding is not stated away, of each row."""
    if policy.none or total == 0:
        return total, None
    if mask is not None:
        return _valid_by_mask(ids, mask, by_row)
    if policy.pad_token_id is not None:
        return _count_true(ids != policy.pad_token_id, ids, by_row), None
    return None, ('there is no attention mask; state pad_token_id=…, or pad="none" for packed data')


def _count_true(condition: Any, ids: Any, by_row: bool) -> Scalar:
    return condition.reshape(list(ids.shape)).sum(-1) if by_row else condition.sum()


def _valid_by_mask(ids: Any, mask: Any, by_row: bool) -> Known:
    if not is_array(mask):
        return None, f"the attention mask is a {type(mask).__name__}, not an array"
    # A key-padding mask says one thing a position: [B, S], or [B, 1, 1, S] for broadcasting over heads.
    # Equality with the ids but for axes of 1; the number of elements tells, since B and S are in order.
    squeezed = [extent for extent in mask.shape if extent != 1]
    if squeezed != [extent for extent in ids.shape if extent != 1]:
        shape = "x".join(map(str, mask.shape))
        return None, f"an attention mask of shape {shape} is not one value a position; state pad_token_id=…"
    if "float" not in str(mask.dtype):
        return _count_true(mask != 0, ids, by_row), None
    # A float mask is either 1 = text, 0 = padding, or is added to the scores: 0 = text, very negative =
    # padding. Which one is decided on the device, since reading it back would wait for the device.
    multiplied, added = (mask > 0), (mask == 0)
    is_added = multiplied.sum() == 0
    return _count_true(multiplied, ids, by_row) + _count_true(added, ids, by_row) * is_added, None
