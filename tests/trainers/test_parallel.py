"""A Trainer whose ranks share their tokens, on two processes: each token counts once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import Stored
from tests.trainers.conftest import Training
from tests.trainers.test_counts import KINDS, expected, totals

OPTIONS = {"pad_token_id": 3, "log_every_steps": 1}


@pytest.fixture(autouse=True)
def _only_where_it_runs(library: str) -> None:
    if library == "paddleformers":
        pytest.skip("PaddleFormers 1.2.0 does not find what it needs of gradient clipping in Paddle 3.3.1")


def test_sharding_ranks_have_batches_of_their_own(
    stored: Stored, launch: Callable[..., list[Training]]
) -> None:
    sharding = {"sharding": "stage1", "sharding_parallel_degree": 2}
    ranks = launch(2, rows=20, options=OPTIONS, arguments=sharding)
    both = {kind: sum(rank.recount[kind] for rank in ranks) for kind in KINDS}
    assert totals(stored) == expected(both)
    assert stored.only_run().data.tags["mlflow_tokens.topology"] == "sharding 2"


@pytest.mark.parametrize(
    ("arguments", "topology"),
    [
        ({"tensor_parallel_degree": 2}, "tensor 2"),
        ({"pipeline_parallel_degree": 2, "gradient_accumulation_steps": 2}, "pipeline 2"),
    ],
    ids=["tensor", "pipeline"],
)
def test_ranks_that_are_given_the_same_batches(
    stored: Stored,
    launch: Callable[..., list[Training]],
    arguments: dict[str, int],
    topology: str,
    is_legacy: bool,
) -> None:
    if is_legacy:
        pytest.skip("tests/gloo_shim.py is made for Paddle 3")
    first, second = launch(
        2, shim=True, rows=16, batches="fixed", mask=False, options=OPTIONS, arguments=arguments
    )
    assert first.recount == second.recount
    assert totals(stored) == expected(first.recount)
    assert stored.only_run().data.tags["mlflow_tokens.topology"] == topology
