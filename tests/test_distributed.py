"""Real jobs of two processes under Paddle's launcher: one run, totals equal to the token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlflow_tokens.account import account_of
from mlflow_tokens.journal import read_journal
from tests.conftest import Stored
from tests.jobs import launch, run_alone


def totals(metrics: dict[str, float]) -> list[float | None]:
    return [metrics.get(f"tokens/{kind}") for kind in ("computed", "valid", "trained", "effective")]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--loss=outside", "--price=98.32 USD/instance-hour x8"),
        ("--loss=inside", "--accumulate=3", "--amp"),
        ("--loss=outside", "--accumulate=2", "--own-run", "--log-loss"),
    ],
    ids=" ".join,
)
def test_two_processes_make_one_run_whose_totals_equal_the_recount(
    stored: Stored, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    done = launch(2, *arguments, f"--visualdl={tmp_path / 'vdl'}", cwd=tmp_path)
    assert done.status == 0, done.output
    recount = done.recount
    assert recount["ranks"] == 2
    run = stored.only_run()
    assert run.info.status == "FINISHED"
    expected = [recount["computed"], recount["valid"], recount["trained"], recount["valid"]]
    assert totals(run.data.metrics) == expected
    assert (run.data.tags["mlflow_tokens.devices"], run.data.tags["mlflow_tokens.device_type"]) == (
        "2",
        "cpu-worker",
    )
    sidecar = json.loads((tmp_path / "vdl" / "tokens" / "mlflow_tokens.json").read_text("utf-8"))
    assert list(sidecar["counts"].values()) == expected
    if "--own-run" in arguments:
        assert run.info.run_name == "mine"
        losses = {step for step, _ in stored.points("loss")}
        assert losses >= {step for step, _ in stored.points("tokens/computed")}
        assert stored.points("tokens/computed")[-1][0] == 22  # 23 steps, counted from 0 as the script does
    if any("price" in argument for argument in arguments):
        # Two devices of an instance of eight: the instance is billed whole.
        hours = run.data.metrics["device/hours"]
        assert run.data.metrics["cost/total"] == pytest.approx(hours / 2 * 98.32, rel=1e-9)
    assert "WARNING mlflow_tokens" not in done.output


def test_the_totals_of_every_snapshot_are_those_of_its_step_on_all_ranks(
    stored: Stored, tmp_path: Path
) -> None:
    done = launch(2, cwd=tmp_path)
    assert done.status == 0, done.output
    longer = stored.points("tokens/computed")
    for steps in (5, 15):
        recount = {"computed": 0}
        for rank in (0, 1):
            recount["computed"] += recount_of(rank, steps)
        assert (steps, recount["computed"]) in longer


def recount_of(rank: int, steps: int) -> int:
    """What tests/scripts/train.py feeds on this rank in its first steps, from its own random numbers."""
    import random

    numbers, computed = random.Random(rank), 0
    for _ in range(steps):
        width = numbers.randint(5, 9 + rank)
        for _ in range(3):
            for _ in range(numbers.randint(2, width)):
                numbers.randint(1, 49)
        computed += 3 * width
    return computed


def test_a_rank_with_more_batches_than_rank_0_hangs_nobody_and_is_counted(
    stored: Stored, tmp_path: Path
) -> None:
    done = launch(2, "--steps=7", "--extra-steps=9", cwd=tmp_path)
    assert done.status == 0, done.output
    assert totals(stored.metrics())[:2] == [done.recount["computed"], done.recount["valid"]]


def test_a_job_in_which_one_rank_does_not_report_has_no_totals_and_ends_well(
    stored: Stored, tmp_path: Path
) -> None:
    done = launch(2, "--only-rank=0", "--price=2 CNY/device-hour", cwd=tmp_path)
    assert done.status == 0, done.output
    assert stored.only_run().info.status == "FINISHED"
    assert stored.metrics() == {}
    assert done.output.count("Tokens and cost of the job are unknown: only 1 of 2 ranks report.") == 1


def test_one_process_into_a_run_of_its_own(stored: Stored, tmp_path: Path) -> None:
    done = run_alone("--accumulate=2", "--price=2 CNY/device-hour", cwd=tmp_path, MLFLOW_RUN_NAME="named")
    assert done.status == 0, done.output
    run = stored.only_run()
    assert (run.info.status, run.info.run_name) == ("FINISHED", "named")
    recount = done.recount
    assert totals(run.data.metrics) == [recount[kind] for kind in ("computed", "valid", "trained", "valid")]


@pytest.mark.parametrize(("end", "status"), [("raise", "FAILED"), ("interrupt", "KILLED")])
def test_a_crash_in_the_middle_of_a_step_keeps_the_steps_before_it(
    stored: Stored, tmp_path: Path, end: str, status: str
) -> None:
    done = run_alone(f"--end={end}", "--steps=7", cwd=tmp_path)
    assert done.status != 0
    assert ("KeyboardInterrupt" if end == "interrupt" else "the script fails") in done.output
    run = stored.only_run()
    assert run.info.status == status
    assert totals(run.data.metrics)[:2] == [done.recount["computed"], done.recount["valid"]]
    (journal,) = (tmp_path / "journal").glob("*.jsonl")
    assert account_of(read_journal(journal)).computed == done.recount["computed"]
