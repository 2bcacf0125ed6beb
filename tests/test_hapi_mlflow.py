"""`mlflow.paddle.autolog()` and ours over one `paddle.Model.fit`: one run, both sets of metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlflow
import paddle
import pytest
from mlflow import MlflowClient
from mlflow.tracking import fluent
from mlflow.utils.autologging_utils import AUTOLOGGING_INTEGRATIONS

import mlflow_tokens
from tests.conftest import Stored
from tests.hapi import Network, callback, fit, hapi_model, loader, recount, totals
from tests.loops import PAD

MLFLOWS = {"loss", "step", "batch_size"}
OWNERS = (mlflow, fluent, MlflowClient, paddle, paddle.Model, paddle.Tensor, paddle.nn.Layer)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """hapi and MLflow write into the directory that they are called in; MLflow's autologging is off after."""
    monkeypatch.chdir(tmp_path)
    yield
    mlflow.paddle.autolog(disable=True)
    AUTOLOGGING_INTEGRATIONS.pop("mlflow", None)


@pytest.fixture(params=["ours first", "MLflow's first"])
def both_on(request: pytest.FixtureRequest, stored: Stored) -> Stored:
    """The store of a script that has called both, in either order."""
    if request.param == "ours first":
        ours()
    mlflow.paddle.autolog(log_models=False)
    if request.param != "ours first":
        ours()
    return stored


def ours(**options: Any) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD, **{"log_every_steps": 2, **options})


def only_mlflows(metrics: Mapping[str, float]) -> bool:
    """Whether there are metrics, and none of ours, which have sections. Of hapi's none is ever forgotten."""
    return set(metrics) >= MLFLOWS and not any("/" in name for name in metrics)


def functions() -> list[dict[str, Any]]:
    return [dict(vars(owner)) for owner in OWNERS]


def test_without_a_run_mlflow_makes_one_which_has_both(both_on: Stored) -> None:
    fit(hapi_model(), 3, eval_data=loader())
    run = both_on.only_run()  # complete when fit returns, with nothing to be called after it
    assert run.info.status == "FINISHED"
    assert set(run.data.metrics) > MLFLOWS | {f"eval_{name}" for name in MLFLOWS}
    assert run.data.params["optimizer_name"] == "AdamW"
    assert run.data.tags["mlflow_tokens.schema"]
    assert recount(3).equals(run.data.metrics)
    assert totals(run.data.metrics) == [192, 135, 75, 135]
    mlflow_tokens.autolog(disable=True)
    assert both_on.only_run().data.metrics == run.data.metrics


def test_ours_are_at_optimizer_steps_where_mlflows_are_at_epochs(both_on: Stored) -> None:
    fit(hapi_model(), 3)
    assert [step for step, _ in both_on.points("loss")] == [0, 1, 2]
    # Three steps an epoch, and the totals of each are those of its step.
    points = [(2, 52), (4, 88), (6, 128), (8, 180), (9, 192)]
    assert both_on.points("tokens/computed") == points


def test_the_first_epoch_is_no_step_though_nothing_of_ours_was_logged_before(stored: Stored) -> None:
    mlflow.paddle.autolog(log_models=False)
    ours(log_every_steps=10)
    fit(hapi_model(), 4)
    assert [step for step, _ in stored.points("loss")] == [0, 1, 2, 3]
    # Ten steps are three epochs of 64 tokens, and a batch of 24.
    assert stored.points("tokens/computed") == [(10, 3 * 64 + 24), (12, 256)]


def test_where_an_epoch_is_one_step_ours_are_at_the_steps_of_the_losses(both_on: Stored) -> None:
    hapi_model().fit(loader(4), epochs=8, verbose=0)
    assert {step for step, _ in both_on.points("loss")} == set(range(8))
    ours = both_on.points("tokens/computed")
    assert ours[-1] == (7, 8 * 24)
    # From when the numbering is known on, MLflow can draw loss against tokens.
    assert len({step for step, _ in ours}) >= 4
    assert all(computed == 24 * (step + 1) for step, computed in ours)


def test_each_fit_without_a_run_has_a_run_and_totals_of_its_own(both_on: Stored) -> None:
    model = hapi_model()
    for epochs in (1, 2, 1):
        fit(model, epochs)
    mlflow_tokens.autolog(disable=True)
    runs = both_on.runs()
    assert [run.info.status for run in runs] == ["FINISHED"] * 3
    for run, epochs in zip(runs, (1, 2, 1), strict=True):
        assert set(run.data.metrics) > MLFLOWS
        assert recount(epochs).equals(run.data.metrics)


def test_into_the_run_that_the_script_has_started(both_on: Stored) -> None:
    with mlflow.start_run(run_name="mine"):
        model = hapi_model()
        fit(model, 1)
        fit(model, 2)
        mlflow.log_metric("mine", 1.0)
    run = both_on.only_run()
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert set(run.data.metrics) > MLFLOWS | {"mine"}
    assert recount(3).equals(run.data.metrics)


def test_an_exception_in_fit_fails_mlflows_run_with_the_last_totals(both_on: Stored) -> None:
    def fails(step: int, logs: Any = None) -> None:
        if step == 1:
            raise RuntimeError("the callback fails")

    with pytest.raises(RuntimeError, match="the callback fails"):
        fit(hapi_model(), callbacks=[callback(on_train_batch_end=fails)])
    run = both_on.only_run()
    assert run.info.status == "FAILED"
    assert totals(run.data.metrics) == [24 + 28, 18 + 17, 10 + 9, 18 + 17]


def test_mlflows_off_leaves_ours(both_on: Stored) -> None:
    mlflow.paddle.autolog(disable=True)
    assert "mlflow" not in paddle.Model.fit.__module__ and not hasattr(paddle.Model.fit, "__wrapped__")
    fit(hapi_model(), 2)
    mlflow_tokens.autolog(disable=True)
    run = both_on.only_run()
    assert run.info.status == "FINISHED"
    assert not MLFLOWS & set(run.data.metrics)
    assert recount(2).equals(run.data.metrics)


@pytest.mark.parametrize("mlflow_is_on", [True, False])
def test_ours_off_leaves_everything_as_it_was(stored: Stored, *, mlflow_is_on: bool) -> None:
    if mlflow_is_on:
        mlflow.paddle.autolog(log_models=False)
    before = functions()
    ours()
    assert functions() != before
    mlflow_tokens.autolog(disable=True)
    assert functions() == before
    fit(hapi_model())
    runs = [run.data.metrics for run in stored.runs()]
    assert len(runs) == mlflow_is_on
    assert all(map(only_mlflows, runs))


def test_ours_off_leaves_mlflows(both_on: Stored) -> None:
    mlflow_fit = paddle.Model.fit
    mlflow_tokens.autolog(disable=True)
    assert paddle.Model.fit is mlflow_fit
    fit(hapi_model())
    run = both_on.only_run()
    assert run.info.status == "FINISHED"
    assert only_mlflows(run.data.metrics)
    mlflow.paddle.autolog(disable=True)
    assert not any(hasattr(vars(paddle.Model)[name], "__wrapped__") for name in ("fit", "save", "load"))


def test_ours_off_in_the_middle_of_fit(both_on: Stored) -> None:
    def off(epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            mlflow_tokens.autolog(disable=True)

    fit(hapi_model(), 3, callbacks=[callback(on_epoch_end=off)])
    run = both_on.only_run()
    assert run.info.status == "FINISHED"
    assert [step for step, _ in both_on.points("loss")] == [0, 1, 2]
    assert recount(1).equals(run.data.metrics)


def test_mlflows_off_in_the_middle_of_fit(both_on: Stored) -> None:
    def off(epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            mlflow.paddle.autolog(disable=True)

    fit(hapi_model(), 3, callbacks=[callback(on_epoch_end=off)])
    mlflow_tokens.autolog(disable=True)
    run = both_on.only_run()
    assert run.info.status == "FINISHED"
    assert recount(3).equals(run.data.metrics)


def test_mlflows_switch_for_all_turns_ours_off(both_on: Stored, capsys: pytest.CaptureFixture[str]) -> None:
    """Paddle is not among those that MLflow 3.17 switches with it: MLflow's own stays on."""
    mlflow_fit = paddle.Model.fit
    mlflow.autolog(disable=True)
    fit(hapi_model(), 2)
    run = both_on.only_run()
    assert run.info.status == "FINISHED"
    assert only_mlflows(run.data.metrics)
    assert mlflow_tokens.current() is None
    assert paddle.Model.fit is mlflow_fit
    assert not any(hasattr(vars(paddle.Model)[name], "__wrapped__") for name in ("save", "load"))
    assert "WARNING mlflow_tokens" not in capsys.readouterr().err


def test_mlflows_switch_for_all_in_the_middle_of_fit(both_on: Stored) -> None:
    def off(epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            mlflow.autolog(disable=True)

    fit(hapi_model(), 3, callbacks=[callback(on_epoch_end=off)])
    run = both_on.only_run()
    assert run.info.status == "FINISHED"
    assert recount(1).equals(run.data.metrics)
    ours()
    fit(hapi_model(), 2)
    mlflow_tokens.autolog(disable=True)
    first, second = both_on.runs()
    assert first.data.metrics == run.data.metrics
    assert recount(2).equals(second.data.metrics)


def test_mlflow_logs_the_model_and_its_summary(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both call the network after training. What a model needs is inferred in a process that loads Paddle."""
    monkeypatch.setattr("mlflow.models.infer_pip_requirements", lambda *args, **kwargs: ["paddlepaddle"])
    ours()
    mlflow.paddle.autolog()
    fit(hapi_model(), 2)
    run = stored.only_run()
    assert run.info.status == "FINISHED"
    assert recount(2).equals(run.data.metrics)
    names = {artifact.path for artifact in stored.client.list_artifacts(run.info.run_id)}
    assert {"model_summary.txt", "mlflow_tokens"} <= names
    (model,) = stored.client.search_logged_models([run.info.experiment_id])
    assert str(model.status) == "READY"


@pytest.mark.parametrize("ours_on", [False, True])
def test_a_summary_that_mlflow_cannot_make_fails_its_run_as_without_us(
    stored: Stored, *, ours_on: bool
) -> None:
    """MLflow 3.17 calls `Model.summary()`, and Paddle 3.3 gives an embedding floats in it."""
    mlflow.paddle.autolog(log_models=False)
    if ours_on:
        ours()
    fit(hapi_model(Network(takes_floats=False)))
    run = stored.only_run()
    assert run.info.status == "FAILED"
    assert set(run.data.metrics) >= MLFLOWS
    assert recount(1).equals(run.data.metrics) is ours_on


def test_a_checkpoint_goes_on_in_a_child_of_the_run_that_saved_it(both_on: Stored, tmp_path: Path) -> None:
    fit(hapi_model(), 2, save_dir=tmp_path / "saved")
    parent = both_on.only_run()
    assert recount(2).equals(parent.data.metrics)
    mlflow_tokens.autolog(disable=True)

    ours()
    model = hapi_model()
    model.load(str(tmp_path / "saved" / "0"))
    fit(model)
    mlflow_tokens.autolog(disable=True)
    parent_after, child = both_on.runs()
    assert parent_after.data.metrics == parent.data.metrics
    assert child.data.tags["mlflow_tokens.parent_run"] == parent.info.run_id
    assert child.info.status == "FINISHED"
    assert set(child.data.metrics) > MLFLOWS
    # The epoch of the checkpoint and one more.
    assert recount(2).equals(child.data.metrics)
