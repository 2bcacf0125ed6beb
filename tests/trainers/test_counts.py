"""The totals of every kind of training with a Trainer, against a recount by the training script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Stored
from tests.trainers.conftest import Train, Training

KINDS = ("computed", "valid", "trained")
ACCUMULATE = {"gradient_accumulation_steps": 2}


def totals(stored: Stored) -> dict[str, float | None]:
    metrics = stored.metrics()
    assert metrics.get("tokens/effective") == metrics.get("tokens/valid")
    return {kind: metrics.get(f"tokens/{kind}") for kind in KINDS}


def expected(recount: dict[str, int], *unknown: str) -> dict[str, int | None]:
    return {kind: None if kind in unknown else recount[kind] for kind in KINDS}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_fine_tuning_with_masked_labels(stored: Stored, train: Train, lora: bool, accumulate: int) -> None:
    """10 rows in batches of 4 end with one of 2; with accumulation the third waits for the next epoch."""
    training = train(lora=lora, arguments={"gradient_accumulation_steps": accumulate, "max_steps": 5})
    assert totals(stored) == expected(training.recount)
    assert training.recount["valid"] < training.recount["computed"]
    # Two labels of every row are a prompt.
    assert training.recount["trained"] < training.recount["valid"]
    assert training.notices() == []


def test_whole_epochs_are_the_whole_data(stored: Stored, train: Train) -> None:
    """10 rows of 12 tokens, twice; a prompt of 2 tokens each is not trained on."""
    training = train(
        batches="full",
        options={"pad": "none"},
        mask=False,
        arguments={"max_steps": -1, "num_train_epochs": 2},
    )
    assert [step["step"] for step in training.steps()] == [1, 2, 3, 4, 5, 6]
    assert totals(stored) == {"computed": 2 * 10 * 12, "valid": 2 * 10 * 12, "trained": 2 * 10 * 10}


@pytest.mark.parametrize("criterion", ["library", "pieces", "layer", "function"])
def test_labels_that_go_into_a_criterion(stored: Stored, train: Train, criterion: str) -> None:
    training = train(criterion=criterion, arguments=ACCUMULATE)
    assert totals(stored) == expected(training.recount)


@pytest.mark.parametrize("criterion", [None, "library"])
def test_a_head_that_is_one_with_the_loss(
    stored: Stored, train: Train, library: str, criterion: str | None
) -> None:
    if library == "paddlenlp":
        pytest.skip("PaddleNLP's Llama has no fused head")
    training = train(fused=True, criterion=criterion)
    assert totals(stored) == expected(training.recount)


def test_pairs_under_their_own_names(stored: Stored, train: Train) -> None:
    """The model is called twice a batch, with chosen and with rejected answers, of different widths."""
    training = train(batches="pairs")
    assert totals(stored) == expected(training.recount)


def test_dpo_trainer(stored: Stored, train: Train, is_legacy: bool) -> None:
    """Labels are 0 outside of the answers, which the loss does not say."""
    pytest.importorskip("paddlenlp", reason="PaddleFormers has its DPO trainer in its command line alone")
    if is_legacy:
        pytest.skip("PaddleNLP 2.8 has its DPO trainer in its examples")
    training = train(batches="dpo", options={"pad_token_id": 0})
    assert totals(stored) == expected(training.recount)


def test_packed_rows(stored: Stored, train: Train) -> None:
    """Four rows in one, with position ids that begin anew and a mask of one block a row."""
    training = train(batches="packed", options={"pad_token_id": 3})
    assert totals(stored) == expected(training.recount)


@pytest.mark.parametrize(
    ("tokenizer", "options", "known"),
    [
        ("<pad>", {}, True),
        ("</s>", {}, False),  # ends of texts would pass for padding
        (None, {}, False),
        (None, {"pad_token_id": 3}, True),
    ],
)
def test_padding_without_a_mask(
    stored: Stored, train: Train, tokenizer: str | None, options: dict[str, Any], known: bool
) -> None:
    training = train(mask=False, batches="fixed", tokenizer=tokenizer, options=options)
    assert totals(stored) == expected(training.recount, *(() if known else ("valid",)))
    source = stored.only_run().data.tags["mlflow_tokens.valid_source"]
    assert source == ("mask, else id != 3" if known else "mask")
    assert len(training.notices()) == (0 if known else 1)


def test_evaluation_and_saving_are_not_training(stored: Stored, train: Train) -> None:
    """One USD a second: what a phase cost is how long it took."""
    training = train(
        options={"price": "3600 USD/device-hour"},
        arguments={"evaluation_strategy": "steps", "eval_steps": 2, "save_steps": 2, "max_steps": 6},
    )
    assert totals(stored) == expected(training.recount)
    metrics, spent = stored.metrics(), training.said("SPENT")
    for phase in ("eval", "checkpoint"):
        assert metrics[f"cost/phase/{phase}"] == pytest.approx(spent[phase], abs=0.1)
    # What comes before the first batch is no training either.
    busy = metrics["cost/phase/train"] + metrics.get("cost/phase/data_wait", 0.0)
    assert 0 < busy <= spent["train"] + 0.1
    rate = metrics["throughput/tokens_per_second_average"]
    assert rate == pytest.approx(training.recount["computed"] / busy, rel=1e-3)


def test_two_ranks(stored: Stored, launch: Callable[..., list[Training]], library: str) -> None:
    """Every rank recounts its own batches, and saves with the other."""
    if library == "paddleformers":
        pytest.skip("PaddleFormers 1.2.0 does not find what it needs of gradient clipping in Paddle 3.3.1")
    ranks = launch(2, rows=20, options={"log_every_steps": 1}, arguments={"save_steps": 2})
    assert len(ranks) == 2
    both = {kind: sum(rank.recount[kind] for rank in ranks) for kind in KINDS}
    assert totals(stored) == expected(both)
    assert {step for step, _ in stored.points("tokens/computed")} == {1, 2, 3, 4}
