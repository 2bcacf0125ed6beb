"""Batches of every kind: counted as plain loops count them, or unknown; nothing raised.

The oracle counts lists of lists in Python and shares no code with the package.
"""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlflow_tokens.clock import PhaseClock
from mlflow_tokens.counting import PadPolicy, count_batch, find_fields
from mlflow_tokens.meter import Meter, Reading
from mlflow_tokens.notices import set_up
from mlflow_tokens.tracker import Tracker

PAD, IGNORED = 3, -100

LIMITS = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


def read(batch: Any, policy: PadPolicy) -> Reading:
    meter = Meter(0, PhaseClock(0.0))
    meter.count(count_batch(find_fields(batch), policy, by_row=meter.samples_lengths))
    meter.step()
    reading = meter.reading(1, final=True)
    assert reading is not None
    return reading


# ---- batches whose counts are known ------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    batch: Any
    policy: PadPolicy
    computed: int
    valid: int | None
    trained: int | None


@st.composite
def known(draw: st.DrawFn) -> Case:
    rows, width = draw(st.integers(1, 4)), draw(st.integers(3, 9))
    lengths = draw(st.lists(st.integers(1, width), min_size=rows, max_size=rows))
    text = [[5 + column for column in range(length)] for length in lengths]
    ids = [row + [PAD] * (width - len(row)) for row in text]
    answers = [draw(st.integers(0, length)) for length in lengths]
    labels = [
        [IGNORED] * (length - answer) + [7] * answer + [IGNORED] * (width - length)
        for length, answer in zip(lengths, answers, strict=True)
    ]
    array = draw(st.sampled_from([np.asarray, paddle.to_tensor]))
    dtype = draw(st.sampled_from(["int64", "int32"]))
    fields: dict[str, Any] = {"input_ids": array(np.asarray(ids, dtype))}
    told = draw(st.sampled_from(["nothing", "id", "none", "mask", "square", "flashmask"]))
    policy = PadPolicy(pad_token_id=PAD if told == "id" else None, none=told == "none")
    valid: int | None = sum(lengths)
    if told == "nothing":
        valid = None
    elif told == "none":
        valid = rows * width
    elif told in ("mask", "square"):
        fields[draw(st.sampled_from(["attention_mask", "padding_mask"]))] = array(
            draw(masks(lengths, width, square=told == "square"))
        )
    elif told == "flashmask":
        starts = [[length] * length + [draw(st.integers(0, length))] * (width - length) for length in lengths]
        shape = draw(st.sampled_from([[rows, width], [rows, 1, width], [rows, 1, width, 1]]))
        fields["attn_mask_startend_row_indices"] = array(np.asarray(starts, "int32").reshape(shape))
    # Masks of query by key in which nothing is padding tell nothing.
    if told in ("square", "flashmask") and valid == rows * width:
        valid = None
    trained: int | None = None
    if draw(st.booleans()):
        flat = draw(st.booleans())
        fields["labels"] = array(np.asarray(labels).reshape([-1] if flat else [rows, width, 1]))
        trained = sum(answers)
        if rows * width == rows:
            trained = None
    noise = {
        "pixels": np.ones((rows, 3)),
        "name": "a text",
        "nothing": None,
        "length": 4,
        "scalar": np.int64(7),
    }
    fields |= {key: noise[key] for key in draw(st.sets(st.sampled_from(sorted(noise))))}
    order = draw(st.permutations(sorted(fields)))
    fields = {key: fields[key] for key in order}
    return Case(draw(wrapped(fields)), policy, rows * width, valid, trained)


@st.composite
def masks(draw: st.DrawFn, lengths: list[int], width: int, *, square: bool) -> np.ndarray:
    """1 for text and 0 for padding, as any type and in any of its shapes."""
    mask = np.array([[1] * length + [0] * (width - length) for length in lengths])
    if square:
        mask = mask[:, None, :] * mask[:, :, None]
        if draw(st.booleans()):
            mask = np.tril(mask)
        heads = draw(st.sampled_from([0, 1, 3]))
        mask = np.repeat(mask[:, None], heads, axis=1) if heads else mask
    elif draw(st.booleans()):
        mask = mask[:, None, None, :]
    if (
        form := draw(st.sampled_from(["bool", "int64", "int32", "uint8", "float32", "float64", "added"]))
    ) != "added":
        return mask.astype(form)
    return np.where(mask == 1, 0.0, draw(st.sampled_from([-1e4, -1e30, -np.inf]))).astype("float32")


def wrapped(fields: dict[str, Any]) -> st.SearchStrategy[Any]:
    """The same batch as loaders hand it over."""
    kind = namedtuple("kind", list(fields))  # type: ignore[misc]
    return st.sampled_from(
        [
            fields,
            UserDict(fields),
            [fields],
            (fields, "text"),
            ((fields,), None),
            kind(**fields),
            {"batch": fields},
        ]
    )


@LIMITS
@given(known())
def test_a_batch_that_can_be_understood_is_counted_to_the_token(case: Case) -> None:
    reading = read(case.batch, case.policy)
    assert (reading.computed, reading.valid, reading.trained) == (case.computed, case.valid, case.trained)


# ---- anything at all ---------------------------------------------------------------------------------------

_NAMES = [
    "input_ids",
    "decoder_input_ids",
    "src_ids",
    "tokens",
    "x",
    "input",
    "attention_mask",
    "padding_mask",
    "decoder_attention_mask",
    "labels",
    "label",
    "y",
    "position_ids",
    "attn_mask_startend_row_indices",
    "startend_row_indices",
    "loss_mask",
    "other",
]
_DTYPES = ["int64", "int32", "int16", "int8", "uint8", "bool", "float16", "float32", "float64", "complex64"]


class Strange:
    """A batch class of the user's own."""

    def __init__(self, value: Any) -> None:
        self.input_ids = value


class Broken:
    """Looks like an array, and every operation fails."""

    dtype = "paddle.int64"
    shape = (2, 4)

    def __ne__(self, other: object) -> Any:
        raise RuntimeError("no such kernel")

    __hash__ = None  # type: ignore[assignment]


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    shape = draw(st.lists(st.integers(0, 4), max_size=5))
    dtype = draw(st.sampled_from(_DTYPES))
    values = np.asarray(draw(st.sampled_from([0, 1, 3, -100, 1e4, np.nan, -np.inf])))
    with np.errstate(invalid="ignore"):
        array = np.broadcast_to(values, shape).astype(dtype)
    return paddle.to_tensor(array) if draw(st.booleans()) else array


def anything() -> st.SearchStrategy[Any]:
    leaves = st.one_of(
        arrays(), st.none(), st.text(max_size=3), st.integers(), st.floats(), st.builds(Strange, arrays())
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.tuples(inner, inner),
            st.dictionaries(st.one_of(st.sampled_from(_NAMES), st.integers(0, 3)), inner, max_size=5),
        ),
        max_leaves=8,
    )


def integer_sizes(value: Any) -> Iterator[int]:
    """Elements of each array of whole numbers in a batch."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from integer_sizes(item)
    elif isinstance(value, np.ndarray | paddle.Tensor) and str(value.dtype).split(".")[-1] in (
        "int64",
        "int32",
        "int16",
    ):
        yield int(np.prod(value.shape))


POLICIES = st.sampled_from([PadPolicy(), PadPolicy(PAD), PadPolicy(none=True)])


@LIMITS
@given(anything(), POLICIES)
def test_anything_else_is_counted_within_its_bounds_or_unknown(batch: Any, policy: PadPolicy) -> None:
    reading = read(batch, policy)
    if reading.computed is None:
        assert reading.valid is None and reading.trained is None
        return
    sizes = list(integer_sizes(batch))
    assert reading.computed in {*sizes, *(a + b for a in sizes for b in sizes)}
    assert reading.valid is None or 0 <= reading.valid <= reading.computed
    assert reading.trained is None or 0 <= reading.trained <= reading.computed
    assert sum(rows for rows, _, _ in reading.lengths.buckets.values()) <= max(1, reading.computed)


@LIMITS
@given(anything())
def test_counting_by_rows_and_all_in_one_agree(batch: Any) -> None:
    fields = find_fields(batch)
    if any(size == 0 for size in integer_sizes(batch)):
        return
    for policy in (PadPolicy(), PadPolicy(PAD)):
        at_once, by_row = count_batch(fields, policy), count_batch(fields, policy, by_row=True)
        assert (at_once.valid is None) == (by_row.valid is None)
        if at_once.valid is not None and int(by_row.valid) >= 0:
            assert int(at_once.valid) == int(by_row.valid)


# ---- in a loop ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "remedy"),
    [
        (Strange(np.ones((2, 4), "int64")), "recognised"),
        ({"input_ids": Broken()}, "no such kernel"),
        ("text", "recognised"),
        ({"input_ids": np.ones((2, 4), "int64"), "attention_mask": [[1, 1, 1, 0]] * 2}, "no attention mask"),
        ({"input_ids": np.ones((2, 4), "int64"), "attention_mask": np.full((2, 4), np.nan)}, "NaN"),
        ({"input_ids": np.ones((2, 4), "int64"), "attention_mask": np.full((2, 4), "a")}, "2x4"),
    ],
)
def test_what_cannot_be_counted_costs_one_line_that_names_the_remedy(
    batch: Any, remedy: str, capsys: pytest.CaptureFixture[str], stored: Any
) -> None:
    with Tracker(
        pad_token_id=PAD if isinstance(batch, dict) and isinstance(batch["input_ids"], Broken) else None
    ) as tracker:
        for _ in range(20):
            tracker.count(batch)
            tracker.step()
    lines = [line for line in capsys.readouterr().err.splitlines() if "nknown" in line]
    assert len(lines) == 1, lines
    assert remedy in lines[0]
    assert "pad_token_id" in lines[0] or "computed=" in lines[0]
    assert "tokens/valid" not in stored.metrics()


def test_totals_beyond_32_and_53_bits_are_exact() -> None:
    set_up(silent=True)
    huge = np.broadcast_to(
        np.int64(7), (100_000, 100_000)
    )  # ten billion positions, and eight bytes of memory
    meter = Meter(0, PhaseClock(0.0))
    for _ in range(3):
        meter.count(count_batch(find_fields({"input_ids": huge}), PadPolicy(none=True)))
    meter.step()
    reading = meter.reading(1)
    assert reading is not None
    assert (reading.computed, reading.valid) == (30_000_000_000, 30_000_000_000)
