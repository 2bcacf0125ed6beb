"""Tokens of steps that were left out, and tokens sent to experts, through the journal to the metrics."""

from __future__ import annotations

from pathlib import Path

import mlflow

import mlflow_tokens
from mlflow_tokens.account import account_of
from mlflow_tokens.journal import read_journal
from mlflow_tokens.records import Quantities, Rollback, decode, encode
from tests.conftest import Stored
from tests.journals import quantities, segment


def reached(name: str, step: int, valid: int, skipped: int, rewinds: int = 0) -> Quantities:
    return quantities(
        name, step=step, position=step, computed=2 * valid, valid=valid, skipped=skipped,
        routed=4 * valid, train=float(step), t_wall=1000.0 * rewinds + step + 1, rewinds=rewinds,
    )  # fmt: skip


def test_a_rollback_leaves_skipped_tokens_where_they_were() -> None:
    """970 effective at the checkpoint and 390 after it; of 1,450 that made a step 480 are rolled back."""
    account = account_of(
        [
            segment("a"),
            reached("a", 100, 1000, 30),
            reached("a", 150, 1500, 50),
            Rollback("b", 0.0, "a", 100),
            segment("b"),
            reached("b", 140, 400, 10, rewinds=1),
        ]
    )
    assert (account.valid, account.skipped, account.rolled_back) == (1900, 60, 480)
    assert account.effective == 970 + 390
    assert account.routed == 7600


def test_what_most_records_do_not_have_is_not_written() -> None:
    plain = quantities(train=1.0, computed=5, valid=5)
    assert not encode(plain).keys() & {"skipped", "routed", "by_source", "lengths"}
    assert decode(encode(plain)) == plain
    rich = quantities(train=1.0, computed=5, valid=5, skipped=2, routed=None, by_source={"a": {"valid": 1}})
    assert decode(encode(rich)) == rich


def test_skipped_and_routed_tokens_are_logged_and_carried_on_by_a_child(
    stored: Stored, tmp_path: Path
) -> None:
    tracker = mlflow_tokens.Tracker(journal_dir=tmp_path)
    for step in range(1, 13):
        tracker.count(computed=16, valid=10)
        tracker.count_routed(32)
        if step % 4 == 0:
            tracker.step_skipped()
        else:
            tracker.step()
    state = tracker.state_dict()
    tracker.close()
    metrics = stored.metrics()
    assert state["step"] == 9
    kinds = ("computed", "valid", "effective", "skipped", "routed")
    assert [metrics[f"tokens/{kind}"] for kind in kinds] == [192, 120, 90, 30, 384]
    with mlflow.start_run() as child:
        tracker = mlflow_tokens.Tracker(journal_dir=tmp_path)
        tracker.load_state_dict(state)
        tracker.count(computed=16, valid=10)
        tracker.count_routed(32)
        tracker.step()
        tracker.close()
    metrics = stored.client.get_run(child.info.run_id).data.metrics
    # The checkpoint has the totals at the end of the ninth step, of eleven micro-batches.
    assert metrics["tokens/effective"] == 90 + 10
    assert metrics["tokens/routed"] == 32 * (11 + 1)
    records = [r for path in tmp_path.glob("*.jsonl") for r in read_journal(path)]
    assert any(isinstance(record, Quantities) and record.skipped == 30 for record in records)


def test_a_run_without_either_logs_neither(stored: Stored) -> None:
    with mlflow_tokens.Tracker() as tracker:
        tracker.count(computed=16, valid=10)
        tracker.step()
    assert not {"tokens/skipped", "tokens/routed"} & stored.metrics().keys()
