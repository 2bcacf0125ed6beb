"""The histogram of row lengths: by hand, and against lists of all rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_tokens.lengths import Lengths, LengthSampler, bucket_of, merge, octave_of, since


def histogram(*batches: list[int], width: int | None = None) -> Lengths:
    sampler = LengthSampler()
    for batch in batches:
        sampler.add(np.array(batch), width or max(batch))
    return sampler.read()


def test_lengths_10_20_30_100_in_rows_of_100() -> None:
    lengths = histogram([10, 20, 30, 100])
    assert lengths.rows == 4
    assert lengths.mean == 40
    assert (lengths.width, lengths.full, lengths.full_ratio) == (100, 1, 0.25)
    assert lengths.buckets[20] == (1, 100, 20)
    assert [lengths.percentile(share) for share in (0.25, 0.5, 0.75, 0.95)] == [10, 20, 30, 100]


def test_ninety_five_of_a_hundred_rows_are_short() -> None:
    lengths = histogram([7] * 95 + [60] * 5)
    assert lengths.percentile(0.95) == 7
    assert lengths.percentile(0.96) == 60


def test_only_rows_of_the_widest_batch_may_be_cut() -> None:
    lengths = merge([histogram([5, 5]), histogram([8, 3], width=8), histogram([8], width=8)])
    assert (lengths.width, lengths.full, lengths.full_ratio) == (8, 2, 0.4)


def test_octaves() -> None:
    lengths = histogram([0, 1, 2, 3, 4, 7, 8, 1000], width=1000).by_octave()
    assert {length: bucket[0] for length, bucket in lengths.buckets.items()} == {
        0: 1,
        1: 1,
        2: 2,
        4: 2,
        8: 1,
        512: 1,
    }
    assert lengths.width == 1000
    assert lengths.by_octave() == lengths


def test_rows_without_padding_are_told_by_their_number() -> None:
    sampler = LengthSampler()
    sampler.add(3, 16)
    assert sampler.read() == Lengths({16: (3, 48, 48)}, 16, 3)


def test_the_sample_grows_with_the_logarithm_and_stands_for_all_rows() -> None:
    sampler, taken = LengthSampler(), 0
    for micro_batch in range(4096):
        if sampler.due(micro_batch):
            sampler.add(np.array([4, 8]), 8)
            taken += 1
    # 512 of the first 512, of every second up to 1,536 and of every fourth up to 3,584; 64 of every eighth.
    assert taken == 512 + 512 + 512 + 64
    assert sampler.read().buckets == {4: (4096, 32768, 16384), 8: (4096, 32768, 32768)}


def test_what_a_run_had_before_is_not_the_next_runs() -> None:
    sampler = LengthSampler()
    sampler.add(np.array([3, 4]), 4)
    before = sampler.read()
    sampler.add(np.array([4, 4, 2]), 4)
    assert since(sampler.read(), before) == Lengths({2: (1, 4, 2), 4: (2, 8, 8)}, 4, 2)


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.95, 1.0]))
def test_the_percentile_is_that_of_the_sorted_rows_to_three_percent(rows: list[int], share: float) -> None:
    lengths = histogram(rows)
    exact = sorted(rows)[math.ceil(share * len(rows) - 1e-9) - 1]
    assert lengths.percentile(share) == pytest.approx(exact, rel=1 / 32)
    assert lengths.mean == pytest.approx(sum(rows) / len(rows))


@given(st.integers(0, 10**9))
def test_a_length_is_in_its_bucket_and_its_octave(length: int) -> None:
    assert bucket_of(length) <= length < bucket_of(length) + max(1, bucket_of(length) / 32 + 1)
    assert octave_of(length) <= length < max(1, 2 * octave_of(length))
    assert octave_of(bucket_of(length)) == octave_of(length)
    if length < 64:
        assert bucket_of(length) == length
