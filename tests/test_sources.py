"""Tokens by data source: counted by hand, in a real store."""

from __future__ import annotations

import json
from collections import UserDict
from pathlib import Path

import mlflow
import numpy as np
import pytest

import mlflow_tokens
from mlflow_tokens.counting import PadPolicy, count_batch, find_fields
from mlflow_tokens.sources import MOST_SOURCES, OTHER, add_sources, by_source
from tests.conftest import Stored

PAD = 9


def batch(*lengths: int, width: int = 8) -> dict[str, object]:
    return {"input_ids": np.array([[1] * length + [PAD] * (width - length) for length in lengths])}


def test_a_batch_of_one_source_and_one_with_a_source_a_row(stored: Stored) -> None:
    with mlflow_tokens.Tracker(pad_token_id=PAD, source_key="origin") as tracker:
        tracker.count(batch(3, 5), source="wiki")  # 8 of 16
        tracker.count(batch(8, 2, 4) | {"origin": ["code", "wiki", "code"]})  # code 12 of 16, wiki 2 of 8
        tracker.count(batch(1) | {"origin": "网页 #1"})  # 1 of 8
        tracker.step()
        tracker.source("code")
        tracker.count(batch(6))  # 6 of 8
        tracker.source(None)
        tracker.count(batch(7))  # of no source
        tracker.step()
    metrics = stored.metrics()
    assert {name: value for name, value in metrics.items() if name.startswith("tokens/source")} == {
        "tokens/source/wiki": 10,
        "tokens/source/code": 18,
        "tokens/source/网页 _1": 1,
        "tokens/source_valid_ratio/wiki": 10 / 24,
        "tokens/source_valid_ratio/code": 18 / 24,
        "tokens/source_valid_ratio/网页 _1": 1 / 8,
    }
    assert metrics["tokens/valid"] == 36
    assert metrics["tokens/valid_ratio"] == 36 / 64
    assert metrics["tokens/sequence_length_mean"] == 36 / 8
    assert metrics["tokens/sequence_length_p95"] == 8
    assert metrics["tokens/full_row_ratio"] == 1 / 8
    run = stored.only_run().info.run_id
    text = mlflow.artifacts.load_text(f"runs:/{run}/mlflow_tokens/tokens.json")
    report = json.loads(text)
    assert report["sources"]["code"] == {"computed": 24, "valid": 18}
    assert report["padding_ratio"] == 28 / 64
    assert dict(report["histogram"]) == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1, 8: 1}


def test_a_restart_adds_to_the_sources_and_a_child_begins_with_its_parents(
    stored: Stored, tmp_path: Path
) -> None:
    tracker = mlflow_tokens.Tracker(pad_token_id=PAD)
    tracker.count(batch(3, 5), source="wiki")
    tracker.step()
    state = tracker.state_dict()
    tracker.close()
    tracker = mlflow_tokens.Tracker(pad_token_id=PAD)
    tracker.load_state_dict(state)
    tracker.count(batch(4), source="wiki")
    tracker.step()
    tracker.close()
    assert stored.metrics()["tokens/source/wiki"] == 12
    with mlflow.start_run() as child:
        tracker = mlflow_tokens.Tracker(pad_token_id=PAD)
        tracker.load_state_dict(state)
        tracker.count(batch(2), source="code")
        tracker.step()
        tracker.close()
    metrics = stored.client.get_run(child.info.run_id).data.metrics
    assert (metrics["tokens/source/wiki"], metrics["tokens/source/code"]) == (8, 2)


@pytest.mark.parametrize("source", [["wiki"], ["a", "b", "c"], [1, 2], np.zeros(2), {"a": 1}])
def test_sources_that_do_not_fit_the_batch_cost_a_line_and_no_tokens(
    stored: Stored, capsys: pytest.CaptureFixture[str], source: object
) -> None:
    with mlflow_tokens.Tracker(pad_token_id=PAD) as tracker:
        for _ in range(3):
            tracker.count(batch(3, 5), source=source)  # type: ignore[arg-type]
            tracker.step()
    metrics = stored.metrics()
    assert metrics["tokens/valid"] == 24
    assert not [name for name in metrics if name.startswith("tokens/source")]
    assert capsys.readouterr().err.count("of no known source") == 1


def test_valid_tokens_of_a_source_are_unknown_where_they_are_of_one_batch(stored: Stored) -> None:
    with mlflow_tokens.Tracker() as tracker:
        tracker.count(computed=10, valid=6, source="a")
        tracker.count(computed=10, source="b")
        tracker.step()
    metrics = stored.metrics()
    assert metrics["tokens/source/a"] == 6
    assert "tokens/source/b" not in metrics


def test_packed_rows_are_full() -> None:
    counts = count_batch(find_fields(batch(8, 8)), PadPolicy(none=True), by_row=True)
    assert by_source(counts, ["a", "b"]) == {"a": (8, 8), "b": (8, 8)}


def test_a_batch_class_is_asked_for_its_source(stored: Stored) -> None:
    with mlflow_tokens.Tracker(pad_token_id=PAD, source_key="origin") as tracker:
        tracker.count(UserDict(batch(3) | {"origin": "wiki"}))
        tracker.step()
    assert stored.metrics()["tokens/source/wiki"] == 3


def test_sources_beyond_a_hundred_are_other() -> None:
    total: dict = {}
    for number in range(MOST_SOURCES + 20):
        total = dict(add_sources(total, {f"s{number}": (2, 1)}))
    assert len(total) == MOST_SOURCES + 1
    assert total[OTHER] == (40, 20)
