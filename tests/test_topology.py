"""Which ranks' tokens count, in topologies that no machine at hand can run, against a brute-force recount.

The fake group of tests/fake_topology.py has Paddle's own coordinates; the recount feeds every rank the rows
that its coordinates stand for, and adds up each row once.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle.distributed.fleet.base.topology import CommunicateTopology

from mlflow_tokens.account import account_of
from mlflow_tokens.aggregate import Moment, Past, quantities
from mlflow_tokens.clock import PhaseClock
from mlflow_tokens.counting import PadPolicy, count_batch, find_fields, fingerprint_of, given_counts
from mlflow_tokens.meter import FINGERPRINTS, Meter, Reading
from mlflow_tokens.ranks import Question
from mlflow_tokens.records import Fullest, Quantities, decode, encode
from mlflow_tokens.topology import Place, ranks_with_tokens, topology_of, topology_of_tensor
from tests.fake_topology import FakeExpertGroup, FakeHybridGroup
from tests.journals import segment

AXES = ["pipe", "data", "sharding", "sep", "model"]
CONTEXT_AXES = ["cp_sharding", "pipe", "context", "model"]


def rows_of(index: int, step: int) -> list[list[int]]:
    """The global batch's share of one data rank: rows of whole sequences, 0 is padding."""
    rng = np.random.default_rng(1000 * index + step)
    lengths = rng.integers(1, 17, 2)
    return [[int(token) for token in rng.integers(1, 50, length)] + [0] * (16 - length) for length in lengths]


def fed(group: Any, index: int, slices: tuple[int, int] | None, steps: int = 2) -> Reading:
    """What a rank of a job reads that is fed the rows of a data rank, or a slice (number, of how many)."""
    rank = group._rank
    meter = Meter(rank, PhaseClock(0.0))
    meter.topology = topology_of(group)
    for step in range(steps):
        ids = np.array(rows_of(index, step))
        if slices is not None:
            ids = np.split(ids, slices[1], axis=1)[slices[0]]
        fields = find_fields({"input_ids": ids})
        counts = count_batch(fields, PadPolicy(pad_token_id=0))
        if meter.wants_fingerprint:
            counts = counts._replace(fingerprint=fingerprint_of(fields))
        meter.count(counts)
        meter.step()
    reading = meter.reading(steps)
    assert reading is not None
    return reading


def recount(data_ranks: int, steps: int = 2) -> tuple[int, int]:
    rows = [row for index in range(data_ranks) for step in range(steps) for row in rows_of(index, step)]
    return sum(len(row) for row in rows), sum(token != 0 for row in rows for token in row)


def taken(readings: list[Reading], steps: int = 2) -> Quantities:
    return quantities(
        {reading.rank: reading for reading in readings},
        segment=segment("a", (len(readings),)),
        seq=1,
        moment=Moment("step", Question(steps), steps, 0.0, 0.0),
        baseline={},
        past=Past(),
    )


def totals(readings: list[Reading]) -> tuple[int | None, int | None]:
    tokens = taken(readings).tokens
    return tokens.get("computed"), tokens.get("valid")


def job(dims: dict[str, int], sliced: bool) -> list[Reading]:
    topology = CommunicateTopology(AXES, [dims[axis] for axis in AXES])
    readings = []
    for rank in range(math.prod(dims.values())):
        group = FakeHybridGroup(topology, rank)
        at = group.coordinate
        index = at.data * dims["sharding"] + at.sharding
        slices = (at.sep, dims["sep"]) if sliced and dims["sep"] > 1 else None
        readings.append(fed(group, index, slices))
    return readings


sizes = st.sampled_from([1, 2, 4])


@settings(max_examples=40, deadline=None)
@given(
    st.fixed_dictionaries(dict.fromkeys(AXES, sizes)).filter(lambda dims: math.prod(dims.values()) <= 128),
    st.booleans(),
)
def test_any_hybrid_topology_counts_every_token_once(dims: dict[str, int], sliced: bool) -> None:
    assert totals(job(dims, sliced)) == recount(dims["data"] * dims["sharding"])


@pytest.mark.parametrize(
    "dims",
    [
        {"pipe": 8, "data": 4, "sharding": 8, "sep": 1, "model": 8},
        {"pipe": 4, "data": 2, "sharding": 8, "sep": 4, "model": 16},
    ],
    ids=["2,048 ranks", "4,096 ranks"],
)
def test_thousands_of_ranks(dims: dict[str, int]) -> None:
    assert totals(job(dims, sliced=True)) == recount(dims["data"] * dims["sharding"])


@pytest.mark.parametrize("sliced", [True, False])
@pytest.mark.parametrize("dims", [(2, 1, 2, 1), (4, 2, 4, 2), (2, 2, 8, 4)])
def test_context_ranks_are_sharding_ranks_as_well(dims: tuple[int, int, int, int], sliced: bool) -> None:
    topology = CommunicateTopology(CONTEXT_AXES, list(dims))
    readings = []
    for rank in range(math.prod(dims)):
        group = FakeExpertGroup(topology, rank)
        slices = (group.coordinate.context, dims[2]) if sliced else None
        readings.append(fed(group, group.coordinate.cp_sharding, slices))
    assert totals(readings) == recount(dims[0])
    assert topology_of(FakeExpertGroup(topology, 0)).sizes["sharding"] == dims[0] * dims[2]


def test_ranks_that_share_sequences_are_unknown_while_they_cannot_be_compared() -> None:
    def reading(rank: int, fingerprint: tuple[int, int] | None) -> Reading:
        place = Place(sequence=(0, 1), fingerprint=fingerprint)
        return Reading(rank, 1, 1, 10, 10, 10, PhaseClock(0.0).seconds(), place=place)

    for other in (None, (3, 20)):
        assert ranks_with_tokens([reading(0, (2, 10)), reading(1, other)]) is None
    assert ranks_with_tokens([reading(0, (2, 10))]) is None  # the other one has not reported
    assert ranks_with_tokens([reading(0, (2, 10)), reading(1, (2, 10))]) == {0}
    assert ranks_with_tokens([reading(0, (2, 10)), reading(1, (2, 11))]) == {0, 1}


def test_counts_by_hand_have_no_fingerprint() -> None:
    topology = CommunicateTopology(AXES, [1, 1, 1, 2, 1])
    readings = []
    for rank in (0, 1):
        meter = Meter(rank, PhaseClock(0.0))
        meter.topology = topology_of(FakeHybridGroup(topology, rank))
        meter.count(given_counts(8, 7, None))
        meter.step()
        reading = meter.reading(1)
        assert reading is not None
        readings.append(reading)
    assert ranks_with_tokens(readings) is None


def test_fingerprints_are_of_the_first_micro_batches_alone() -> None:
    topology = CommunicateTopology(AXES, [1, 1, 1, 2, 1])
    group = FakeHybridGroup(topology, 0)
    short, long = (fed(group, 0, None, steps) for steps in (FINGERPRINTS, FINGERPRINTS + 5))
    assert short.place == long.place
    assert short.place.fingerprint is not None
    assert short.place.fingerprint[0] == FINGERPRINTS


def test_the_topology_in_words() -> None:
    topology = CommunicateTopology(AXES, [2, 4, 1, 1, 8])
    assert str(topology_of(FakeHybridGroup(topology, 0))) == "data 4 x tensor 8 x pipeline 2"


def test_a_tensor_that_is_spread_over_a_mesh_of_two_dimensions() -> None:
    """Of six processes [[4, 2, 0], [5, 3, 1]] rows share the batch, and the three of a row have it all."""
    placements = [SimpleNamespace(is_shard=lambda: True), SimpleNamespace(is_shard=lambda: False)]
    mesh = SimpleNamespace(process_ids=[4, 2, 0, 5, 3, 1], shape=[2, 3])
    tensor = SimpleNamespace(process_mesh=mesh, placements=placements)
    holding = [rank for rank in range(7) if not topology_of_tensor(tensor, rank).replica]
    assert holding == [4, 5]
    assert topology_of_tensor(tensor, 4).sizes == {"data": 2, "tensor": 3}


@pytest.mark.parametrize(("sliced", "expected"), [(False, Fullest(2, 30, 2)), (True, Fullest(2, 50, 2))])
def test_the_fullest_data_rank(sliced: bool, expected: Fullest) -> None:
    """Ranks 0 and 1 share sequences, as 2 and 3 do; a fifth is a replica of the first."""
    places = [Place(sequence=(0, 1)), Place(sequence=(0, 1)), Place(sequence=(2, 3)), Place(sequence=(2, 3))]
    valid = [10, 10 if not sliced else 5, 30, 30 if not sliced else 20]
    readings = []
    for rank, (place, tokens) in enumerate(zip(places, valid, strict=True)):
        mark = rank if sliced else min(place.sequence)
        readings.append(
            Reading(
                rank,
                1,
                1,
                64,
                tokens,
                None,
                PhaseClock(0.0).seconds(),
                place=replace(place, fingerprint=(1, mark)),
            )
        )
    readings.append(Reading(4, 1, 1, 64, 10, None, PhaseClock(0.0).seconds(), place=Place(replica=True)))
    record = taken(readings, steps=1)
    assert record.fullest == expected
    assert decode(json.loads(json.dumps(encode(record)))) == record
    # 30 of 40 tokens are 1.5 times the mean; 50 of 65 are 1.538… times.
    account = account_of([segment("a", (5,)), record])
    assert account.rank_skew == pytest.approx(30 / 20 if not sliced else 50 / 32.5)
    assert account.fullest_rank == 2
