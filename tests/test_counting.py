"""Counting one batch: each rule of the design, with figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_tokens.counting import BatchCounts, PadPolicy, count_batch, count_labels, find_fields

PAD = 151643
UNSTATED = PadPolicy()


def padded(lengths: list[int], width: int, pad: int = PAD) -> np.ndarray:
    return np.array([[7] * length + [pad] * (width - length) for length in lengths])


def counts(batch: object, policy: PadPolicy = UNSTATED) -> tuple[int | None, int | None, int | None]:
    counted = count_batch(find_fields(batch), policy)
    return counted.computed, as_int(counted.valid), as_int(counted.trained)


def as_int(value: object) -> int | None:
    return None if value is None else int(value)  # type: ignore[call-overload]


def test_lengths_10_20_30_100_padded_to_100_are_400_computed_and_160_valid() -> None:
    ids = padded([10, 20, 30, 100], 100)
    assert counts({"input_ids": ids, "attention_mask": (ids != PAD).astype("int64")}) == (400, 160, None)
    assert counts({"input_ids": ids}, PadPolicy(pad_token_id=PAD)) == (400, 160, None)


def test_sft_900_prompt_100_answer_24_pad_is_1024_computed_1000_valid_100_trained() -> None:
    ids = padded([1000], 1024)
    labels = np.array([[-100] * 900 + [7] * 100 + [-100] * 24])
    assert counts({"input_ids": ids, "labels": labels}, PadPolicy(pad_token_id=PAD)) == (1024, 1000, 100)


def test_without_mask_or_stated_padding_valid_is_unknown_even_where_zeros_look_like_padding() -> None:
    counted = count_batch(find_fields({"input_ids": padded([3, 5], 8, pad=0)}), UNSTATED)
    assert (counted.computed, counted.valid) == (16, None)
    assert "pad_token_id" in str(counted.reason)


def test_packed_data_is_all_valid() -> None:
    assert counts({"input_ids": padded([8, 8], 8)}, PadPolicy(none=True)) == (16, 16, None)


def test_the_mask_goes_before_the_pad_id() -> None:
    ids = padded([3, 5], 8)
    everything = np.ones_like(ids)
    assert counts({"input_ids": ids, "attention_mask": everything}, PadPolicy(pad_token_id=PAD))[1] == 16


@pytest.mark.parametrize("dtype", ["bool", "int64", "float32"])
@pytest.mark.parametrize("shape", [(2, 8), (2, 1, 1, 8)])
def test_a_mask_of_ones_and_zeros_counts_its_ones(dtype: str, shape: tuple[int, ...]) -> None:
    ids = padded([3, 5], 8)
    mask = (ids != PAD).astype(dtype).reshape(shape)
    assert counts({"input_ids": ids, "attention_mask": mask}) == (16, 8, None)


@pytest.mark.parametrize("minus", [-1e4, -np.inf, np.finfo("float32").min])
def test_a_mask_that_is_added_to_the_scores_counts_its_zeros(minus: float) -> None:
    ids = padded([3, 5], 8)
    mask = np.where(ids != PAD, 0.0, minus).astype("float32")
    assert counts({"input_ids": ids, "attention_mask": mask}) == (16, 8, None)
    assert counts({"input_ids": ids, "attention_mask": np.zeros((2, 8), "float32")}) == (16, 16, None)


def test_encoder_and_decoder_inputs_are_both_computed() -> None:
    batch = {
        "input_ids": padded([3, 5], 8),
        "attention_mask": np.array([[1] * 3 + [0] * 5, [1] * 5 + [0] * 3]),
        "decoder_input_ids": padded([2, 1], 4),
        "decoder_attention_mask": np.array([[1, 1, 0, 0], [1, 0, 0, 0]]),
        "labels": np.array([[5, 6, -100, -100], [5, -100, -100, -100]]),
    }
    assert counts(batch) == (24, 11, 3)


def test_an_empty_batch_holds_nothing_that_is_unknown() -> None:
    empty = np.zeros((0, 8), "int64")
    assert counts({"input_ids": empty, "labels": empty}) == (0, 0, 0)


@pytest.mark.parametrize(
    "batch",
    [
        None,
        {},
        [],
        "text",
        7,
        {"input_ids": "text"},
        {"pixels": np.zeros((2, 3, 8, 8), "float32")},
        {"labels": np.zeros((2, 8), "int64")},
        {"position_ids": np.zeros((2, 8), "int64")},
        np.zeros((), "int64"),
        np.zeros((2, 8), "uint8"),
        [["nested", {"deep": [[[[np.zeros((2, 8), "int64")]]]]}]],
    ],
)
def test_a_batch_without_recognisable_ids_is_unknown_and_says_so(batch: object) -> None:
    assert count_batch(find_fields(batch), UNSTATED) == BatchCounts(
        None, None, None, reason="no token ids were recognised in the batch"
    )


def test_ids_are_found_in_tuples_and_under_other_names() -> None:
    ids, mask = padded([3, 5], 8), np.ones((2, 8), "int64")
    assert counts((ids,))[0] == 16
    assert counts([ids, np.zeros(2, "int64")])[0] == 16
    assert counts({"src_ids": ids})[0] == 16
    assert counts(({"input_ids": ids, "attention_mask": mask}, np.zeros(2)))[:2] == (16, 16)
    assert counts(ids)[0] == 16


def test_one_dimensional_ids_of_a_flattened_batch_are_counted() -> None:
    assert counts({"input_ids": np.arange(11)}, PadPolicy(none=True)) == (11, 11, None)


def test_labels_that_are_a_class_a_row_are_not_trained_tokens() -> None:
    assert counts({"input_ids": padded([3, 5], 8), "labels": np.array([0, 1])})[2] is None
    assert count_labels(np.zeros((2, 8), "float32"), -100, {16}) is None


def test_labels_of_a_model_shifted_by_the_caller_are_one_less_a_row() -> None:
    labels = np.array([[5, 6, 7, -100, -100, -100, -100], [5, 6, 7, 8, 9, -100, -100]])
    assert counts({"input_ids": padded([3, 5], 8), "labels": labels})[2] == 8


def test_another_ignore_index() -> None:
    labels = np.array([[1, 2, 0, 0]])
    assert counts({"input_ids": padded([4], 4), "labels": labels}, PadPolicy(ignore_index=0))[2] == 2


@pytest.mark.parametrize("shape", [(2, 4), (2, 4, 1), (8,)])
def test_a_loss_mask_says_which_labels_are_trained_on(shape: tuple[int, ...]) -> None:
    labels = np.array([[5, 6, 7, -100], [5, 6, -100, -100]])
    loss_mask = np.array([[0, 1, 1, 1], [0, 1, 0, 0]], "float32").reshape(shape)
    batch = {"input_ids": padded([4, 4], 4), "labels": labels, "loss_mask": loss_mask}
    assert counts(batch)[2] == 3  # 6 and 7 of the first row, 6 of the second
    assert counts({**batch, "loss_mask": loss_mask.reshape(-1)[:4]})[2] is None


@given(st.lists(st.integers(0, 64), min_size=1, max_size=8))
def test_any_padding_agrees_with_adding_up_the_lengths(lengths: list[int]) -> None:
    width = max(*lengths, 1)
    ids = padded(lengths, width)
    assert counts({"input_ids": ids}, PadPolicy(pad_token_id=PAD))[:2] == (len(lengths) * width, sum(lengths))


def test_counting_reads_nothing_back_from_the_device() -> None:
    class DeviceArray:
        """Stands in for device memory: it can be compared and summed, and must not be read."""

        dtype = "int64"

        def __init__(self, *shape: int) -> None:
            self.shape = shape

        def __ne__(self, other: object) -> DeviceArray:  # type: ignore[override]
            return self

        def sum(self) -> DeviceArray:
            return DeviceArray()

        def __add__(self, other: object) -> DeviceArray:
            return self

        __radd__ = __add__

        def _read(self, *_: object) -> None:
            raise AssertionError("device memory was read")

        __int__ = __float__ = __bool__ = __index__ = __iter__ = __array__ = item = numpy = tolist = _read

    array = DeviceArray(4, 100)
    counted = count_batch(find_fields({"input_ids": array, "labels": array}), PadPolicy(pad_token_id=0))
    assert counted.computed == 400
    assert isinstance(counted.valid, DeviceArray) and isinstance(counted.trained, DeviceArray)
