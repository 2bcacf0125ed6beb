"""Checkpoints of `paddle.Model` and of raw loops carry where they were saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

import mlflow_tokens
from tests.conftest import Stored
from tests.loops import VOCABULARY, Model

ROWS, WIDTH = 4, 6
BATCHES = 5


class Texts(paddle.io.Dataset):
    """20 rows of 6 ids: 5 batches of 24 tokens an epoch."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = np.arange(index, index + WIDTH, dtype="int64") % VOCABULARY
        return row, row

    def __len__(self) -> int:
        return ROWS * BATCHES


def hapi_model() -> Any:
    ids = paddle.static.InputSpec([None, WIDTH], "int64", "ids")
    labels = paddle.static.InputSpec([None, WIDTH], "int64", "labels")
    paddle.utils.unique_name.switch()  # names are given as in a new process
    model = paddle.Model(Model(), [ids], [labels])
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    model.prepare(optimizer, paddle.nn.CrossEntropyLoss())
    return model


def fit(model: Any, epochs: int, save_dir: Path | None = None) -> None:
    model.fit(
        Texts(), epochs=epochs, batch_size=ROWS, verbose=0, shuffle=False, save_dir=save_dir and str(save_dir)
    )


def test_modelcheckpoint_is_resumed_in_its_run(stored: Stored, tmp_path: Path) -> None:
    mlflow_tokens.autolog(pad="none", log_every_steps=2)
    fit(hapi_model(), 3, tmp_path / "saved")
    mlflow_tokens.autolog(disable=True)
    saved = {path.name for path in (tmp_path / "saved").glob("*.mlflow_tokens.json")}
    assert saved == {f"{name}.mlflow_tokens.json" for name in ("0", "1", "2", "final")}

    mlflow_tokens.autolog(pad="none", log_every_steps=2)
    model = hapi_model()
    model.load(str(tmp_path / "saved" / "0"))
    fit(model, 1)
    mlflow_tokens.autolog(disable=True)
    metrics = stored.metrics()
    # Three epochs and one; of the first three one survives. An epoch has 5 batches of 24 tokens.
    assert metrics["tokens/computed"] == 4 * 5 * 24
    assert metrics["tokens/effective"] == 2 * 5 * 24


@pytest.mark.parametrize("trains_on", [False, True])
def test_the_best_checkpoint_throws_nothing_away_until_training_goes_on(
    stored: Stored, tmp_path: Path, *, trains_on: bool
) -> None:
    mlflow_tokens.autolog(pad="none", log_every_steps=2)
    model = hapi_model()
    fit(model, 2, tmp_path / "saved")
    model.load(str(tmp_path / "saved" / "0"))
    model.evaluate(Texts(), batch_size=ROWS, verbose=0)
    model.save(str(tmp_path / "best"))
    state = json.loads((tmp_path / "best.mlflow_tokens.json").read_text())
    assert state == json.loads((tmp_path / "saved" / "0.mlflow_tokens.json").read_text())
    if trains_on:
        fit(model, 1)
    mlflow_tokens.autolog(disable=True)
    metrics = stored.metrics()
    assert metrics["tokens/computed"] == (3 if trains_on else 2) * BATCHES * ROWS * WIDTH
    assert metrics["tokens/effective"] == 2 * BATCHES * ROWS * WIDTH


def test_weights_alone_resume_nothing(stored: Stored, tmp_path: Path) -> None:
    mlflow_tokens.autolog(pad="none")
    model = hapi_model()
    fit(model, 1)
    model.save(str(tmp_path / "saved" / "base"))
    model.save(str(tmp_path / "inference" / "base"), training=True)
    mlflow_tokens.autolog(disable=True)
    first = stored.only_run().info.run_id

    mlflow_tokens.autolog(pad="none")
    model = hapi_model()
    model.load(str(tmp_path / "saved" / "base.pdparams"), reset_optimizer=True)  # fine-tuning
    fit(model, 1)
    mlflow_tokens.autolog(disable=True)
    runs = {run.info.run_id: run.data.metrics["tokens/effective"] for run in stored.runs()}
    assert len(runs) == 2
    assert runs.pop(first) == 5 * 24
    assert list(runs.values()) == [5 * 24]


def test_a_sidecar_that_cannot_be_written_or_read_costs_a_line(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow_tokens.autolog(pad="none")
    model = hapi_model()
    fit(model, 1)
    (tmp_path / "a.mlflow_tokens.json").mkdir()
    model.save(str(tmp_path / "a"))
    assert (tmp_path / "a.pdparams").is_file()
    assert capsys.readouterr().err.count("could not be noted") == 1
    model.save(str(tmp_path / "b"))
    (tmp_path / "b.mlflow_tokens.json").write_text("{")
    model.load(str(tmp_path / "b"))
    with pytest.raises(Exception, match="check path"):
        model.load(str(tmp_path / "absent"))
    mlflow_tokens.autolog(disable=True)
    assert "mlflow_tokens" not in paddle.Model.save.__module__
    assert not hasattr(paddle.Model.save, "__wrapped__")


def test_a_raw_loop_keeps_the_state_in_paddles_own_checkpoint(stored: Stored, tmp_path: Path) -> None:
    tracker = mlflow_tokens.Tracker()
    for _ in range(3):
        tracker.count(computed=10, valid=10)
        tracker.step()
    state = tracker.state_dict()
    layer = Model()
    paddle.save({"model": layer.state_dict(), "tokens": state}, str(tmp_path / "c.pdparams"))
    tracker.count(computed=10, valid=10)
    tracker.step()
    tracker.close()
    loaded = paddle.load(str(tmp_path / "c.pdparams"))
    assert loaded["tokens"] == state
    tracker = mlflow_tokens.Tracker()
    tracker.load_state_dict(loaded["tokens"])
    tracker.count(computed=10, valid=10)
    tracker.step()
    tracker.close()
    assert stored.metrics()["tokens/computed"] == 50
    assert stored.metrics()["tokens/effective"] == 40
