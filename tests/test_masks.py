"""Padding as attention masks tell it: each shape that PaddleNLP and PaddleFormers use, worked out by hand.

The batch is of two rows of six positions, of which 4 and 6 are text, if nothing else is said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from mlflow_tokens.clock import PhaseClock
from mlflow_tokens.counting import PadPolicy, count_batch, find_fields
from mlflow_tokens.meter import Meter, Reading

IDS = np.array([[7, 7, 7, 7, 9, 9], [7, 7, 7, 7, 7, 9]])
TEXT = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
#: Of query by key: causal, with padding as neither.
SQUARE = np.tril(np.ones((2, 6, 6), "int64")) * TEXT[:, None, :] * TEXT[:, :, None]

ARRAYS = pytest.mark.parametrize("array", [np.asarray, paddle.to_tensor], ids=["numpy", "paddle"])


def read(batch: dict[str, Any], policy: PadPolicy | None = None) -> Reading:
    """What a meter reads after one step over the batch."""
    meter = Meter(0, PhaseClock(0.0))
    fields = find_fields(batch)
    meter.count(count_batch(fields, policy or PadPolicy(), by_row=meter.samples_lengths))
    meter.step()
    reading = meter.reading(1, final=True)
    assert reading is not None
    alone = count_batch(fields, policy or PadPolicy()).valid
    if reading.valid is not None:
        assert int(alone) == reading.valid, "counted by rows and all in one"
    return reading


def valid_of(batch: dict[str, Any], policy: PadPolicy | None = None) -> tuple[int | None, dict[int, int]]:
    """Valid tokens, and the rows by their length."""
    reading = read(batch, policy)
    return reading.valid, {length: rows for length, (rows, _, _) in reading.lengths.buckets.items()}


def additive(mask: np.ndarray, minus: float = -1e9) -> np.ndarray:
    return np.where(mask == 1, 0.0, minus).astype("float32")


@ARRAYS
@pytest.mark.parametrize("form", ["bool", "int64", "int32", "float32", "float16", "additive", "infinite"])
@pytest.mark.parametrize(
    "mask",
    [TEXT, TEXT[:, None, None, :], SQUARE, SQUARE[:, None], np.repeat(SQUARE[:, None], 3, axis=1)],
    ids=["BxS", "Bx1x1xS", "BxSxS", "Bx1xSxS", "BxHxSxS"],
)
def test_a_mask_of_any_shape_and_type(array: Callable[[Any], Any], form: str, mask: np.ndarray) -> None:
    if form == "additive":
        values = additive(mask)
    elif form == "infinite":
        values = additive(mask, -np.inf)
    else:
        values = mask.astype(form)
    batch = {"input_ids": array(IDS), "attention_mask": array(values)}
    assert valid_of(batch) == (10, {4: 1, 6: 1})


@ARRAYS
def test_one_row_with_a_mask_of_two_dimensions_query_by_key(array: Callable[[Any], Any]) -> None:
    assert valid_of({"input_ids": array(IDS[:1]), "attention_mask": array(SQUARE[0])}) == (4, {4: 1})


@ARRAYS
def test_a_block_diagonal_mask_of_packed_rows(array: Callable[[Any], Any]) -> None:
    blocks = np.zeros((1, 1, 6, 6), bool)
    blocks[0, 0, :2, :2] = blocks[0, 0, 2:5, 2:5] = True  # documents of 2 and 3, one position of padding
    assert valid_of({"input_ids": array(IDS[:1]), "attention_mask": array(blocks)}) == (5, {5: 1})


def test_a_square_mask_without_padding_is_no_knowledge_until_one_shows_padding(
    capsys: pytest.CaptureFixture[str],
) -> None:
    causal = np.tril(np.ones((2, 1, 6, 6)))
    meter = Meter(0, PhaseClock(0.0))
    for mask, known in ((causal, None), (causal, None), (SQUARE[:, None], 12 + 12 + 10), (causal, 46)):
        meter.count(count_batch(find_fields({"input_ids": IDS, "attention_mask": mask}), PadPolicy()))
        meter.step()
        reading = meter.reading(meter.current_step)
        assert reading is not None
        assert (reading.computed, reading.valid) == (12 * meter.current_step, known)


@pytest.mark.parametrize("policy", [PadPolicy(pad_token_id=9), PadPolicy(none=True)], ids=["id", "packed"])
def test_what_is_stated_goes_before_a_square_mask(policy: PadPolicy) -> None:
    causal = np.tril(np.ones((2, 1, 6, 6)))
    expected = 12 if policy.none else 9  # two and one positions of id 9
    assert valid_of({"input_ids": IDS, "attention_mask": causal}, policy)[0] == expected


@pytest.mark.parametrize("shape", [(6, 6), (1, 1, 6, 6), (1, 6, 6), (2, 5, 5), (2, 1, 6, 5), (3, 6), (12,)])
def test_a_mask_of_another_shape_says_nothing(shape: tuple[int, ...]) -> None:
    counts = count_batch(find_fields({"input_ids": IDS, "attention_mask": np.ones(shape)}), PadPolicy())
    assert counts.valid is None
    assert "x".join(map(str, shape)) in str(counts.reason)
    assert "pad_token_id" in str(counts.reason)


@ARRAYS
@pytest.mark.parametrize(
    "start",
    [
        [[4, 4, 4, 4, 0, 0], [6] * 6],  # PaddleNLP's tokenizers pad with 0
        [[4, 4, 4, 4, 4, 4], [6] * 6],  # its DPO collator with the length
        [[4, 4, 4, 4, 4, 5], [6] * 6],  # PaddleFormers with the position itself
        [[2, 2, 4, 4, 0, 0], [1, 3, 3, 6, 6, 6]],  # several documents in a row
    ],
    ids=["zero", "length", "position", "packed"],
)
@pytest.mark.parametrize("shape", [(2, 6), (2, 1, 6), (2, 1, 6, 1), (2, 4, 6, 1)])
@pytest.mark.parametrize("name", ["attn_mask_startend_row_indices", "startend_row_indices"])
def test_flashmask(array: Callable[[Any], Any], start: list[Any], shape: tuple[int, ...], name: str) -> None:
    heads = shape[1] if len(shape) > 2 else 1
    indices = np.stack([np.array(start)] * heads, axis=1)
    batch = {"input_ids": array(IDS), name: array(indices.reshape(shape).astype("int32"))}
    assert valid_of(batch) == (10, {4: 1, 6: 1})


@ARRAYS
def test_flashmask_with_four_bounds(array: Callable[[Any], Any]) -> None:
    bounds = np.zeros((2, 1, 6, 4), "int32")
    # Not causal: key j is masked for queries from the first bound up to the second, and of the other pair.
    bounds[:, 0, :, :] = [6, 6, 0, 0]  # nobody
    bounds[0, 0, 4, :] = [0, 6, 0, 0]  # everybody, below
    bounds[0, 0, 5, :] = [6, 6, 0, 6]  # everybody, above
    assert valid_of({"input_ids": array(IDS), "attn_mask_startend_row_indices": array(bounds)})[0] == 10


def test_flashmask_with_two_bounds_is_unknown() -> None:
    batch = {"input_ids": IDS, "attn_mask_startend_row_indices": np.zeros((2, 1, 6, 2), "int32")}
    counts = count_batch(find_fields(batch), PadPolicy())
    assert counts.valid is None
    assert "2x1x6x2" in str(counts.reason)


@ARRAYS
@pytest.mark.parametrize("mask", [TEXT, SQUARE[:, None]], ids=["BxS", "Bx1xSxS"])
def test_a_mask_with_nan_makes_valid_unknown_for_good(array: Callable[[Any], Any], mask: np.ndarray) -> None:
    spoilt = mask.astype("float32")
    spoilt[0, ..., 0] = np.nan
    meter = Meter(0, PhaseClock(0.0))
    for values in (mask, spoilt, *[mask] * 20):
        batch = {"input_ids": array(IDS), "attention_mask": array(values)}
        meter.count(count_batch(find_fields(batch), PadPolicy(), by_row=meter.samples_lengths))
        meter.step()
    first, later, last = meter.reading(1), meter.reading(2), meter.reading(22, final=True)
    assert first is not None
    assert later is not None
    assert last is not None
    assert (first.valid, later.valid, last.valid) == (10, None, None)
    assert last.computed == 22 * 12
    assert all(length >= 0 for length in last.lengths.buckets)


@ARRAYS
def test_whole_numbers_below_0_are_no_mask_that_anybody_knows(array: Callable[[Any], Any]) -> None:
    batch = {"input_ids": array(IDS), "attention_mask": array((TEXT - 1) * 10000)}
    assert read(batch).valid is None


@ARRAYS
def test_numbers_of_documents_are_text_and_0_is_padding(array: Callable[[Any], Any]) -> None:
    documents = np.array([[1, 1, 2, 2, 0, 0], [1, 2, 2, 3, 3, 3]])
    assert valid_of({"input_ids": array(IDS), "attention_mask": array(documents)}) == (10, {4: 1, 6: 1})
