"""Real hybrid parallel jobs on CPUs: totals equal a recount of what each data rank was fed, once.

What stock Paddle does not run on CPUs runs with tests/gloo_shim.py. Jobs of four processes are in
test_hybrid_mixes.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tests.conftest import Stored
from tests.jobs import SCRIPTS, Done, launch

HYBRID = SCRIPTS / "hybrid.py"
#: What gloo itself says when its processes miss each other.
_RACES = ("Connection refused", "Connection reset by peer", "Connection closed by peer", "Timed out waiting")


def launch_hybrid(processes: int, *arguments: str, cwd: Path, script: Path = HYBRID) -> Done:
    """Run the job, and once more where gloo's processes have missed each other."""
    folder = cwd / "first"
    folder.mkdir()
    done = launch(processes, *arguments, cwd=folder, script=script)
    if done.status != 0 and any(line in done.output for line in _RACES):
        warnings.warn(f"gloo's processes missed each other in {arguments}: run again", stacklevel=2)
        folder = cwd / "second"
        folder.mkdir()
        done = launch(processes, *arguments, cwd=folder, script=script)
    return done


def check(done: Done, stored: Stored, *, trained: bool = True) -> None:
    """One run whose totals are those of the recount."""
    assert done.status == 0, done.output
    assert done.recount["computed"] > 0, done.output
    metrics = stored.metrics()
    kinds = ["computed", "valid", *(["trained"] if trained else [])]
    assert {kind: metrics.get(f"tokens/{kind}") for kind in kinds} == {
        kind: done.recount[kind] for kind in kinds
    }
    if not trained:
        assert "tokens/trained" not in metrics
    assert "Counting failed" not in done.output


@pytest.mark.parametrize(
    ("arguments", "topology"),
    [
        ("--stock --dp 2 --accumulate 2", "data 2"),
        ("--stock --sharding 2 --recompute", "sharding 2"),
        ("--stock --sep 2", "sep 2"),
        ("--mp 2 --accumulate 2", "tensor 2"),
        ("--pp 2 --accumulate 2", "pipeline 2"),
    ],
)
def test_two_processes(stored: Stored, tmp_path: Path, arguments: str, topology: str) -> None:
    check(launch_hybrid(2, *arguments.split(), cwd=tmp_path), stored)
    assert stored.only_run().data.tags["mlflow_tokens.topology"] == topology


def test_whole_sequences_that_the_model_slices_itself_are_counted_once(
    stored: Stored, tmp_path: Path
) -> None:
    # Each rank's labels are of its slice, and its ids are not: how many are trained on is not known.
    done = launch_hybrid(2, "--stock", "--sep=2", "--split=inside", cwd=tmp_path)
    check(done, stored, trained=False)


@pytest.mark.parametrize("mesh", ["dp", "mp"])
def test_auto_parallel_tensors_have_the_shape_of_the_whole(stored: Stored, tmp_path: Path, mesh: str) -> None:
    done = launch_hybrid(2, f"--mesh={mesh}", cwd=tmp_path, script=SCRIPTS / "auto_parallel.py")
    check(done, stored)
    expected = {"dp": "data 2", "mp": "tensor 2"}[mesh]
    assert stored.only_run().data.tags["mlflow_tokens.topology"] == expected
