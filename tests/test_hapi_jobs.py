"""`paddle.Model.fit` in real processes: how they end, and two of them under Paddle's launcher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Stored
from tests.hapi import totals
from tests.jobs import SCRIPTS, Done, ForkServer, launch

SCRIPT = SCRIPTS / "hapi.py"
TEXT = 41  # of the first nine rows
#: Three epochs of ten rows: rank 1 is given the first one, of 3 tokens, once more.
ON_TWO_RANKS = [3 * 10 * 7, 3 * (TEXT + 3), 3 * (TEXT + 3 - 20), 3 * (TEXT + 3)]


def counted(done: Done) -> list[int]:
    return [done.recount[kind] for kind in ("computed", "valid", "trained", "valid")]


@pytest.fixture(scope="module")
def processes() -> Iterator[ForkServer]:
    server = ForkServer("tests.hapi")
    yield server
    server.close()


@pytest.mark.parametrize("arguments", [(), ("--mlflow=before",)], ids=["alone", "with MLflow's"])
def test_an_exception_that_ends_the_process_fails_the_run(
    stored: Stored, tmp_path: Path, processes: ForkServer, arguments: tuple[str, ...]
) -> None:
    job = processes.start(
        "--end=raise",
        *arguments,
        cwd=tmp_path,
        script=SCRIPT,
        MLFLOW_TRACKING_URI=stored.uri,
        MLFLOW_TOKENS_JOURNAL_DIR=str(tmp_path / "journal"),
    )
    assert job.wait() == 1
    assert "the callback fails" in job.output()
    run = stored.only_run()
    assert run.info.status == "FAILED"
    assert ("loss" in run.data.metrics) is bool(arguments)
    # Two epochs of nine rows, each padded to 7; the first two labels of each are its prompt's.
    expected = [2 * 9 * 7, 2 * TEXT, 2 * (TEXT - 18), 2 * TEXT]
    assert totals(run.data.metrics) == expected
    (seen,) = job.recounts("RECOUNT")
    assert [seen[kind] for kind in ("computed", "valid", "trained", "valid")] == expected


def test_two_ranks_that_fit_wraps_by_itself(stored: Stored, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    done = launch(2, "--accumulate=2", f"--save-dir={saved}", cwd=tmp_path, script=SCRIPT)
    assert done.status == 0, done.output
    run = stored.only_run()
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow_tokens.devices"] == "2"
    assert totals(run.data.metrics) == ON_TWO_RANKS
    assert totals(run.data.metrics) == counted(done)
    # Batches of 2, 2 and 1 rows a rank, two to a step: hapi updates after the second one and the last.
    assert stored.points("tokens/computed")[-1][0] == 6
    assert run.data.metrics["cost/phase/eval"] > 0  # hapi evaluates the network without its wrapper
    assert "WARNING mlflow_tokens" not in done.output
    names = {path.name for path in saved.glob("*.mlflow_tokens.json")}
    assert names == {f"{name}.mlflow_tokens.json" for name in ("0", "1", "2", "final")}


def test_two_ranks_with_mlflows_have_all_tokens_in_the_run_of_rank_0(stored: Stored, tmp_path: Path) -> None:
    """MLflow's own makes a run on every rank."""
    done = launch(2, "--mlflow=after", cwd=tmp_path, script=SCRIPT)
    assert done.status == 0, done.output
    runs = stored.runs()
    assert [run.info.status for run in runs] == ["FINISHED"] * 2
    assert all("loss" in run.data.metrics for run in runs)
    (ours,) = (run for run in runs if any(name.startswith("tokens/") for name in run.data.metrics))
    assert totals(ours.data.metrics) == ON_TWO_RANKS
    assert totals(ours.data.metrics) == counted(done)
    assert stored.points("tokens/computed", ours.info.run_id)[-1][0] == 9
