"""Where a Trainer's numbers are recorded: steps, callbacks, other writers, checkpoints and resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Stored
from tests.trainers.conftest import Train

SAVE = {"save_steps": 2, "max_steps": 6}


@pytest.mark.parametrize("logging_steps", [1, 2])
def test_ours_are_logged_at_the_steps_of_the_loss(
    stored: Stored, train_alone: Train, logging_steps: int
) -> None:
    """The script begins with autolog() and imports its Trainer afterwards; its callback logs to MLflow."""
    options = {"log_every_steps": logging_steps}
    training = train_alone(mlflow=True, options=options, arguments={"logging_steps": logging_steps})
    loss, tokens = stored.points("loss"), stored.points("tokens/computed")
    assert [step for step, _ in loss] == list(range(logging_steps, 5, logging_steps))
    by_step = {step["step"]: step["computed"] for step in training.steps()}
    assert dict(tokens) == {step: by_step[step] for step, _ in loss}
    assert stored.only_run().info.status == "FINISHED"


def test_steps_without_a_logger(stored: Stored, train: Train) -> None:
    train(options={"log_every_steps": 3}, arguments={"logging_steps": 4, "max_steps": 8})
    assert {4, 8} <= {step for step, _ in stored.points("tokens/computed")}


def test_steps_whose_data_is_skipped(stored: Stored, train: Train, is_legacy: bool) -> None:
    """The Trainer counts them, as its script may wish; nothing is trained on in them."""
    if is_legacy:
        pytest.skip("PaddleNLP 2.8 skips no data")
    training = train(
        options={"log_every_steps": 1}, arguments={"skip_data_intervals": [[2, 3]], "max_steps": 8}
    )
    trained = {step["step"]: step["computed"] for step in training.steps()}
    assert len(trained) == 6
    points = stored.points("tokens/computed")
    assert points[-1] == (8, trained[8])
    # Ours go on at the Trainer's steps once two of those say by how many it is ahead.
    assert {step: value for step, value in points if step > 4} == {n: trained[n] for n in trained if n > 4}


@pytest.mark.parametrize("install", ["callback", "added"])
def test_by_hand(stored: Stored, train: Train, install: str) -> None:
    training = train(install=install, options={"log_every_steps": 1}, arguments=SAVE)
    metrics = stored.metrics()
    assert metrics["tokens/computed"] == training.recount["computed"]
    assert metrics["tokens/valid"] == training.recount["valid"]
    assert metrics["tokens/trained"] == training.recount["trained"]
    assert stored.only_run().info.status == "FINISHED"


def test_visualdl_of_the_trainer_and_of_ours_side_by_side(
    stored: Stored, train: Train, tmp_path: Path
) -> None:
    pytest.importorskip("visualdl")
    from visualdl import LogReader

    training = train(
        options={"visualdl": "logs", "log_every_steps": 1},
        arguments={"report_to": ["visualdl"], "logging_dir": "logs"},
    )
    files = list((tmp_path / "logs").rglob("*.log"))
    values = {}
    for file in files:
        reader = LogReader(file_path=str(file))
        for tag in reader.get_tags().get("scalar", []):
            values[tag] = {point.id: point.value for point in reader.get_data("scalar", tag)}
    assert set(values["train/loss"]) >= {1, 2, 3, 4}
    by_step = {step["step"]: step["computed"] for step in training.steps()}
    assert values["tokens/computed"] == by_step


def test_training_is_the_same_to_the_bit_with_and_without_us(train: Train, tmp_path: Path) -> None:
    def run(install: str) -> list[str]:
        training = train(install=install, options={"log_every_steps": 1}, arguments=SAVE)
        return [
            *map(str, training.logged()),
            *(line for line in training.output.split("\n") if "RANDOM" in line),
        ]

    assert run("none") == run("autolog") == run("callback")


@pytest.mark.parametrize("install", ["autolog", "callback", "added"])
def test_a_crash_and_a_restart_from_a_checkpoint(
    stored: Stored, train: Train, tmp_path: Path, install: str
) -> None:
    """It is killed in step 6; what came after checkpoint-4 is trained again, skipping 4 batches."""
    case = {
        "install": install,
        "options": {"log_every_steps": 1},
        "rows": 40,
        "arguments": SAVE | {"max_steps": 8},
    }
    first = train(kill_after=5, **case)
    for step in (2, 4):
        state = json.loads((tmp_path / "out" / f"checkpoint-{step}" / "mlflow_tokens.json").read_text())
        assert state["step"] == step
    second = train(resume="out/checkpoint-4", **case)
    assert [step["step"] for step in second.steps()] == [5, 6, 7, 8]
    kept = first.steps()[3]
    metrics = stored.metrics()
    for kind in ("computed", "valid", "trained"):
        assert metrics[f"tokens/{kind}"] == first.recount[kind] + second.recount[kind]
    assert metrics["tokens/effective"] == kept["valid"] + second.recount["valid"]
    assert stored.points("tokens/computed")[-1][0] == 8


def test_another_training_of_the_same_trainer_from_a_checkpoint(stored: Stored, train: Train) -> None:
    training = train(
        trainings=2,
        resume="out/checkpoint-2",
        options={"log_every_steps": 1},
        arguments=SAVE | {"max_steps": 4},
    )
    steps = training.steps()
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 3, 4]
    metrics = stored.metrics()
    assert metrics["tokens/computed"] == steps[-1]["computed"]
    thrown_away = steps[3]["valid"] - steps[1]["valid"]
    assert metrics["tokens/effective"] == steps[-1]["valid"] - thrown_away


def test_the_best_model_throws_nothing_away(stored: Stored, train: Train) -> None:
    training = train(
        arguments=SAVE
        | {
            "evaluation_strategy": "steps",
            "eval_steps": 2,
            "load_best_model_at_end": True,
            "metric_for_best_model": "loss",
            "greater_is_better": True,  # the loss falls: the first checkpoint is loaded
        }
    )
    assert "Loading best model from" in training.output
    assert stored.metrics()["tokens/effective"] == training.recount["valid"]
