"""What a token is: the counting of one batch.

Works on anything that has `shape` and `dtype` and can be compared and summed: Paddle tensors, NumPy
arrays. Sums stay on the device as 0-d arrays; nothing here reads device memory.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from mlflow_tokens.masks import by_diagonal, by_masked_rows, by_position, count_where, dtype_of

#: A count that may still be on the device: an int, or a 0-d integer array.
Scalar = Any

_IDS = ("input_ids", "decoder_input_ids")
_IDS_NAMES = ("src_ids", "token_ids", "tokens", "ids")
_IDS_ALIASES = (*_IDS_NAMES, "src", "x", "input", "inputs")
_STARTEND = ("attn_mask_startend_row_indices", "startend_row_indices")
_MASKS = ("attention_mask", "padding_mask")
_LABELS = ("labels", "label", "target_ids", "targets", "lm_labels", "target", "y")
_NOT_IDS = (
    "t timesteps position_ids token_type_ids segment_ids task_type_ids seq_lens lengths cu_seqlens "
    "loss_mask attn_mask decoder_attention_mask"
)
_NEVER_IDS = frozenset((*_MASKS, *_LABELS, *_STARTEND, *_NOT_IDS.split()))
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


class BatchCounts(NamedTuple):
    """Tokens of one micro-batch; None means unknown, and `reason` says why.

    A tuple, as `Fields`, since one is made for every micro-batch.
    """

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
    by_source: Mapping[str, tuple[Scalar | None, Scalar | None]] = MappingProxyType({})
    """Computed and valid tokens of each data source that was named."""
    fingerprint: Scalar | None = None
    """A number that depends on the ids and their order; only where it was asked for."""


class Fields(NamedTuple):
    """The arrays of a batch that counting looks at."""

    ids: tuple[Any, ...] = ()
    mask: Any = None
    decoder_mask: Any = None
    labels: Any = None
    loss_mask: Any = None
    """1 where a label is trained on."""
    startend: Any = None
    """Flashmask: of each key, from which query on it is masked, or between which."""


def count_batch(fields: Fields, policy: PadPolicy, *, by_row: bool = False) -> BatchCounts:
    """Count the tokens of one micro-batch.

    computed: all positions of all ids, padding included.
    valid: the mask's, else those whose id is not the stated pad id, else unknown.
    trained: labels != ignore_index, under the loss mask if there is one; unknown while no labels are seen.

    by_row: give the valid tokens of each row as well, of the first ids (an encoder's).
    """
    if not fields.ids:
        return BatchCounts(None, None, None, reason="no token ids were recognised in the batch")
    computed, rows, width = 0, None, None
    label_sizes: frozenset[int] = frozenset()
    for number, ids in enumerate(fields.ids):
        shape = ids.shape
        total = math.prod(shape)
        computed += total
        label_sizes |= _label_sizes(shape, total)
        if number == 0 and len(shape) == 2:
            rows, width = shape
    trained: Scalar | None = None
    if fields.labels is not None:
        trained = count_labels(fields.labels, policy.ignore_index, label_sizes, fields.loss_mask)
    valid: Scalar | None = 0
    reason = lengths = by_square = None
    for index, ids in enumerate(fields.ids):
        total = computed if len(fields.ids) == 1 else size(ids)
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
        valid = valid + part if index else part
    return BatchCounts(computed, valid, trained, label_sizes, reason, rows, width, lengths, by_square)


def fingerprint_of(fields: Fields) -> Scalar | None:
    """A number that depends on the ids and their order in each row, on the device; None without ids.

    The sum of id times position, so that the slices of a sequence differ unless all ids are the same.
    """
    if not fields.ids or size(fields.ids[0]) == 0:
        return None
    ids = fields.ids[0].astype("int64")
    position = (ids == ids).astype("int64").cumsum(-1)  # noqa: PLR0124
    return (ids * position).sum()


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


def count_labels(
    labels: Any, ignore_index: int, label_sizes: Iterable[int], loss_mask: Any = None
) -> Scalar | None:
    """Labels that are trained on; None when there is not one label a token (a class a row, soft labels)."""
    total = size(labels)
    if not _is_integer(labels) or total not in label_sizes:
        return None
    if loss_mask is None:
        return (labels != ignore_index).sum() if total else 0
    if size(loss_mask) != total:
        return None
    is_trained = (labels != ignore_index).reshape([-1]) & (loss_mask != 0).reshape([-1])
    return is_trained.sum() if total else 0


def find_fields(arguments: Any) -> Fields:
    """Find ids, mask and labels in what a model was called with.

    Args:
        arguments: a mapping, an array, or a sequence of those, as a loader or a caller hands them over.
    """
    named: dict[str, Any] = {}
    unnamed: list[Any] = []
    _collect(arguments, None, named, unnamed)
    ids = tuple(named[name] for name in _IDS if name in named and _is_ids(named[name]))
    if not ids:
        candidates = [named[name] for name in _IDS_ALIASES if name in named]
        candidates += unnamed
        candidates += [value for name, value in named.items() if name not in _NEVER_IDS]
        ids = tuple(value for value in candidates if _is_ids(value) and len(value.shape) == 2)[:1]
        # A flat batch is told from a class a row or a time step by its name alone.
        ids = ids or tuple(named[name] for name in _IDS_NAMES if _is_ids(named.get(name)))[:1]
    return Fields(
        ids,
        _first(named, _MASKS),
        named.get("decoder_attention_mask"),
        _first(named, _LABELS),
        named.get("loss_mask"),
        _first(named, _STARTEND),
    )


def is_spread(array: Any) -> bool:
    """Whether this is a tensor of Paddle's auto parallel: its shape is the whole one's, on every process."""
    is_dist = getattr(array, "is_dist", None)
    return is_dist is not None and bool(is_dist())


def local(array: Any) -> Any:
    """What this process has of a tensor that is spread over several: sums of it wait for nobody."""
    return array._local_value() if is_spread(array) else array


def local_fields(fields: Fields) -> Fields:
    """The same with what this process has of each array."""
    others = (fields.mask, fields.decoder_mask, fields.labels, fields.loss_mask, fields.startend)
    return Fields(tuple(map(local, fields.ids)), *map(local, others))


def size(array: Any) -> int:
    """Number of elements, from the shape alone."""
    return math.prod(array.shape)


def is_array(value: Any) -> bool:
    """Whether this is a tensor or an array rather than a container, a number or text."""
    kind: Any = type(value)
    return _is_array_type(kind) or (hasattr(value, "shape") and hasattr(value, "dtype"))


#: Types that were found to be arrays.
_SEEN: set[type[Any]] = set()


@lru_cache(maxsize=256)
def _is_array_type(kind: type[Any]) -> bool:
    # Asked of a tensor, each of the two costs more than all the rest.
    is_array_type = hasattr(kind, "shape") and hasattr(kind, "dtype")
    if is_array_type and len(_SEEN) < 256:
        _SEEN.add(kind)
    return is_array_type


def _collect(value: Any, name: str | None, named: dict[str, Any], unnamed: list[Any], depth: int = 0) -> None:
    """Sort the arrays of a batch into those with a name and those without."""
    if is_array(value):
        if name is None:
            unnamed.append(value)
        else:
            named.setdefault(name, value)
    elif value is None or depth > 3:
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if type(key) is str and type(item) in _SEEN:  # as nearly always
                named.setdefault(key, item)
                continue
            _collect(item, key if isinstance(key, str) else None, named, unnamed, depth + 1)
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", ())
        for index, item in enumerate(value):
            _collect(item, names[index] if index < len(names) else None, named, unnamed, depth + 1)


def _is_on_host(value: Any) -> bool:
    return type(value).__module__ == "numpy"


def _is_integer(value: Any) -> bool:
    return is_array(value) and dtype_of(value) in _INTEGERS


def _is_ids(value: Any, dimensions: tuple[int, ...] = (1, 2)) -> bool:
    return _is_integer(value) and len(value.shape) in dimensions


def _first(named: Mapping[str, Any], names: Iterable[str]) -> Any:
    for name in names:
        if name in named:
            return named[name]
    return None


def _label_sizes(shape: Sequence[int], total: int) -> frozenset[int]:
    """One label a position, or one less a row; as many as there are rows may be a class a row."""
    if len(shape) != 2 or total == 0:
        return frozenset((total, max(0, total - 1)))
    return frozenset((total, total - shape[0])) - {shape[0]}


def _valid(ids: Any, mask: Any, startend: Any, policy: PadPolicy, by_row: bool) -> tuple[Scalar | None, bool]:
    """Valid tokens, all in one or of each row, or None; and whether a mask of query by key tells them."""
    shape = list(ids.shape)
    readable = mask is not None and dtype_of(mask).startswith(("bool", "int", "uint", "float", "bfloat"))
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
        if array is not None:
            shape = "x".join(map(str, array.shape))
            told = f"{name} of {dtype_of(array)} and shape {shape}"
            return f"{told} does not tell padding from text; state pad_token_id=…"
    return 'there is no attention mask; state pad_token_id=…, or pad="none" for packed data'
