"""What an attention mask says about padding, in every shape that PaddleNLP and PaddleFormers use.

Like `counting`, on anything that can be compared and summed; what is read off a mask stays on the device.
A mask of which nobody knows what it means (NaN, whole numbers below 0) is found out on the device, too:
it makes its count, and any total that the count is added to, negative.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

#: More tokens than a process can be fed, and few enough to be taken off half a million times in 64 bits.
UNREADABLE = 1 << 44


def by_position(mask: Any, shape: list[int], by_row: bool) -> Any | None:
    """Text by a mask with one value a position: [B, S], or [B, 1, 1, S] for broadcasting over heads.

    Equality with the ids but for axes of 1; the number of elements tells, since B and S are in order.

    Args:
        mask: boolean, 1 = text and 0 = padding, or 0 = text and very negative = padding.
        shape: of the ids.
        by_row: count each row of the ids.

    Returns:
        An integer array without dimensions, of one by row; None where the mask has another shape.
    """
    if (mask_shape := list(mask.shape)) != shape and _without_ones(mask_shape) != _without_ones(shape):
        return None
    return _text(mask, shape, by_row)


def by_diagonal(mask: Any, shape: list[int], by_row: bool) -> Any | None:
    """Text by a mask of query by key: [B, S, S], [B, 1, S, S] or [B, H, S, S]; for one row [S, S] as well.

    A position is text if it may attend to itself. Heads agree about padding, so the first one tells. A
    mask that is the same for all rows of a batch (as one for causality alone) says nothing: None.
    """
    rows, width = shape if len(shape) == 2 else (1, *shape)
    square = list(mask.shape)
    if square[-2:] != [width, width] or len(square) > 4 or (square[:-2] or [1])[0] != rows:
        return None
    while len(mask.shape) > 3:
        mask = mask[:, 0]
    return _text(mask.diagonal(0, -2, -1), shape, by_row)


def by_masked_rows(startend: Any, shape: list[int], by_row: bool) -> Any | None:
    """Text by flashmask's row indices: [B, S], [B, H, S], [B, H, S, 1] or [B, H, S, 4].

    Of key j, queries from row start_j on are masked; with four values those from the first up to before
    the second, and from the third up to before the fourth. A position is text if it may attend to itself:
    padding has start_j <= j, be it 0 (PaddleNLP's tokenizers), the length (its DPO collator) or j
    (PaddleFormers). Two values mean one thing in a causal mask and another in one that is not: None.
    """
    rows, width = shape if len(shape) == 2 else (1, *shape)
    form = list(startend.shape)
    bounds = form.pop() if len(form) == 4 else 1
    if len(form) not in (2, 3) or form[0] != rows or form[-1] != width or bounds not in (1, 4):
        return None
    if len(form) == 3:
        startend = startend[:, 0]
    bound = startend.astype("int64").reshape([rows, width, bounds])
    key = (bound[:, :, 0] == bound[:, :, 0]).astype("int64").cumsum(-1) - 1
    if bounds == 1:
        return count_where(bound[:, :, 0] > key, shape, by_row)
    lower = (bound[:, :, 0] <= key) & (key < bound[:, :, 1])
    upper = (bound[:, :, 2] <= key) & (key < bound[:, :, 3])
    return count_where((lower | upper) == (key < 0), shape, by_row)


def count_where(condition: Any, shape: list[int], by_row: bool) -> Any:
    """How many positions are true: all in one, or of each row."""
    return condition.reshape(shape).sum(-1) if by_row else condition.sum()


def dtype_of(array: Any) -> str:
    """The name of an array's type of numbers, such as "int64", in Paddle as in NumPy."""
    return _name_of(array.dtype)


@lru_cache(maxsize=256)
def _name_of(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


def _text(mask: Any, shape: list[int], by_row: bool) -> Any:
    kind = dtype_of(mask)
    if "float" not in kind:
        text = count_where(mask if "bool" in kind else mask != 0, shape, by_row)
        # A script's masks are all of one kind, so those of the sample tell.
        return _unless((mask < 0).any(), text) if by_row and "int" in kind else text
    # A float mask is either 1 = text, 0 = padding, or is added to the scores: 0 = text, very negative =
    # padding. Which one is decided on the device, since reading it back would wait for the device.
    multiplied, added = (mask > 0), (mask == 0)
    is_added = multiplied.sum() == 0
    text = count_where(multiplied, shape, by_row) + count_where(added, shape, by_row) * is_added
    return _unless((mask != mask).any(), text)  # noqa: PLR0124


def _unless(unreadable: Any, text: Any) -> Any:
    return text - unreadable.astype("int64") * UNREADABLE


def _without_ones(shape: list[int]) -> list[int]:
    return [extent for extent in shape if extent != 1]
