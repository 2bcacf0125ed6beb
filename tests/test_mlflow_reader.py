"""The MLflow reader against real sqlite stores: what it returns, and what it says when it cannot."""

from __future__ import annotations

import math
import socket
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric

from mlflow_tokens.comparison.mlflow_reader import MlflowReader, without_password
from mlflow_tokens.comparison.reader import MissingError, ReadError
from mlflow_tokens.comparison.thinning import evenly
from tests.stored_runs import RUNS, StoredRun, copied_store, experiment_id, store_runs


@pytest.fixture(scope="module")
def stored(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    uri = copied_store(empty_store, tmp_path_factory.mktemp("stored"))
    return uri, store_runs(uri)


def test_experiments_come_by_name(stored: tuple[str, dict[str, str]]) -> None:
    reader = MlflowReader(stored[0])
    assert [experiment.name for experiment in reader.experiments()] == ["Default", "pretrain", "sft"]


def test_runs_hold_what_was_stored(stored: tuple[str, dict[str, str]]) -> None:
    uri, ids = stored
    rows = {row.run_id: row for row in MlflowReader(uri).runs()}
    assert len(rows) == len(RUNS)
    grouped = rows[ids["grouped"]]
    assert (grouped.run_name, grouped.experiment_name, grouped.status) == ("grouped", "pretrain", "FINISHED")
    assert grouped.metrics["tokens/effective"] == 1_200_000
    assert grouped.metrics["cost/total"] == 4.8
    assert grouped.metrics["cost/per_million_tokens"] == 4.0
    assert grouped.tags["mlflow_tokens.token_definition"] == "attention mask"
    assert grouped.params == {"batch_size": "8"}
    assert grouped.start_time_ms == 1_760_000_001_000
    assert grouped.end_time_ms == 1_760_000_041_000
    assert rows[ids["cluster"]].metrics["tokens/computed"] == 10_251_184_259
    assert "cost/total" not in rows[ids["unpriced"]].metrics


def test_only_the_experiments_asked_for(stored: tuple[str, dict[str, str]]) -> None:
    reader = MlflowReader(stored[0])
    assert {row.run_name for row in reader.runs(["pretrain"])} == {"padded", "grouped", "packed"}
    assert reader.runs([]) == []


def test_runs_of_others_and_deleted_runs_stay_out(store: str) -> None:
    ids = store_runs(store, (StoredRun("ours"), StoredRun("deleted")))
    client = MlflowClient(tracking_uri=store)
    client.log_metric(client.create_run(experiment_id(client, "pretrain")).info.run_id, "loss", 1.0)
    client.delete_run(ids["deleted"])
    assert [row.run_name for row in MlflowReader(store).runs()] == ["ours"]


def test_more_runs_than_a_page(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = store_runs(store, tuple(StoredRun(f"run {number}", steps=1) for number in range(7)))
    monkeypatch.setattr("mlflow_tokens.comparison.mlflow_reader._PAGE", 3)
    assert sorted(row.run_id for row in MlflowReader(store).runs()) == sorted(ids.values())


def test_nan_and_infinity_come_back(store: str) -> None:
    run_id = store_runs(store, (StoredRun("odd"),))["odd"]
    client = MlflowClient(tracking_uri=store)
    odd = {"cost/total": math.inf, "loss": math.nan, "device/hours": -math.inf}
    client.log_batch(run_id, metrics=[Metric(name, value, 1, 1) for name, value in odd.items()])
    reader = MlflowReader(store)
    (row,) = reader.runs()
    assert row.metrics["cost/total"] == math.inf
    assert row.metrics["device/hours"] == -math.inf
    assert math.isnan(row.metrics["loss"])
    (curve,) = reader.curves([run_id], "cost/total")
    assert curve.values == (math.inf,)


def test_a_curve_as_it_was_logged(stored: tuple[str, dict[str, str]]) -> None:
    uri, ids = stored
    (curve,) = MlflowReader(uri).curves([ids["grouped"]], "tokens/effective")
    assert curve.run_id == ids["grouped"]
    assert curve.steps == (1, 2, 3, 4)
    assert curve.values == (300_000, 600_000, 900_000, 1_200_000)
    assert curve.timestamps_ms == tuple(1_760_000_001_000 + 10_000 * step for step in (1, 2, 3, 4))


def test_a_run_without_the_metric_has_no_curve(stored: tuple[str, dict[str, str]]) -> None:
    uri, ids = stored
    curves = MlflowReader(uri).curves([ids["unpriced"], ids["packed"]], "cost/total")
    assert [curve.run_id for curve in curves] == [ids["packed"]]


def test_a_long_curve_is_thinned_with_its_ends(store: str) -> None:
    run_id = store_runs(store, (StoredRun("long", cost=201.0, steps=201),))["long"]
    (curve,) = MlflowReader(store).curves([run_id], "cost/total", max_points=11)
    assert curve.steps == (1, 21, 41, 61, 81, 101, 121, 141, 161, 181, 201)
    assert curve.values[-1] == 201.0


def test_the_order_is_that_of_time_after_a_restart(store: str) -> None:
    run_id = store_runs(store, (StoredRun("resumed"),))["resumed"]
    points = [Metric("loss", 3.0, 10, 1), Metric("loss", 2.0, 20, 2), Metric("loss", 2.5, 30, 1)]
    MlflowClient(tracking_uri=store).log_batch(run_id, metrics=points)
    (curve,) = MlflowReader(store).curves([run_id], "loss")
    assert (curve.steps, curve.values) == ((1, 2, 1), (3.0, 2.0, 2.5))


def test_an_unknown_experiment_is_named_with_those_there_are(stored: tuple[str, dict[str, str]]) -> None:
    with pytest.raises(
        MissingError, match="no experiment named 'pretrian'; there: 'Default', 'pretrain', 'sft'"
    ):
        MlflowReader(stored[0]).runs(["pretrian", "sft"])


@pytest.mark.parametrize("run_id", ["0" * 32, "'; drop table runs; --"])
def test_an_unknown_run(stored: tuple[str, dict[str, str]], run_id: str) -> None:
    with pytest.raises(MissingError, match=r"not found|Invalid value"):
        MlflowReader(stored[0]).curves([run_id], "cost/total")


def test_a_server_that_does_not_answer_is_said_at_once() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        uri = f"http://user:secret@127.0.0.1:{unheard.getsockname()[1]}"
        with pytest.raises(
            ReadError, match=r"no server answers at http://user:\*\*\*@127\.0\.0\.1:"
        ) as caught:
            MlflowReader(uri)
    assert "secret" not in str(caught.value)


def test_a_uri_that_is_none() -> None:
    with pytest.raises(ReadError, match="Check the tracking URI"):
        MlflowReader("gopher://nowhere")


def test_evenly() -> None:
    assert evenly(0, 5) == []
    assert evenly(5, 5) == [0, 1, 2, 3, 4]
    assert evenly(101, 5) == [0, 25, 50, 75, 100]
    with pytest.raises(ValueError, match="at least 2"):
        evenly(5, 1)


def test_passwords_are_not_shown() -> None:
    assert without_password("postgresql://me:pa%20ss@db:5432/x") == "postgresql://me:***@db:5432/x"
    assert without_password("sqlite:///mlflow.db") == "sqlite:///mlflow.db"
