"""`mlflow-tokens sync`: what a dead job left arrives once, in the right run, from anywhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlflow
import pytest
from mlflow.entities import Metric

import mlflow_tokens
from mlflow_tokens.cli import main
from mlflow_tokens.journal import Journal, read_journal
from mlflow_tokens.records import Quantities, RunBound
from tests.conftest import Stored
from tests.journals import price, quantities, segment

AWAY = "http://127.0.0.1:9"


def train(journals: Path, steps: int = 25) -> None:
    tracker = mlflow_tokens.Tracker(price="2 USD/device-hour", log_every_steps=10, journal_dir=journals)
    for _ in range(steps):
        tracker.count(computed=10, valid=8)
        tracker.step()
    tracker.close()


def sync(*arguments: object) -> int:
    return main(["sync", *map(str, arguments)])


def points(stored: Stored, metric: str = "tokens/computed") -> list[tuple[int, float]]:
    return stored.points(metric)


EXPECTED = [(10, 100.0), (20, 200.0), (25, 250.0)]


def test_the_server_was_away_for_good(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_NAME", "夜间训练")
    mlflow.set_tracking_uri(AWAY)
    train(tmp_path / "j")
    said = capsys.readouterr().err
    assert "Could not write to MLflow" in said
    assert f"`mlflow-tokens sync {tmp_path / 'j'}`" in said
    mlflow.set_tracking_uri(stored.uri)
    assert stored.runs() == []

    # On another machine.
    shutil.copytree(tmp_path / "j", tmp_path / "copy")
    assert sync(tmp_path / "copy", "--tracking-uri", stored.uri) == 0
    assert points(stored) == EXPECTED
    run = stored.only_run()
    assert (run.info.status, run.info.run_name) == ("FINISHED", "夜间训练")
    assert run.data.tags["mlflow_tokens.currency"] == "USD"
    written = sum(len(points(stored, name)) for name in run.data.metrics)
    assert f"run {run.info.run_id}: {written} points written, ended as FINISHED" in capsys.readouterr().out

    # Again, and from the machine where the job ran: the same run, nothing twice.
    assert sync(tmp_path / "copy", "--tracking-uri", stored.uri) == 0
    assert "0 points written" in capsys.readouterr().out
    assert sync(tmp_path / "j", "--tracking-uri", stored.uri) == 0
    assert "0 points written" in capsys.readouterr().out
    assert points(stored) == EXPECTED
    assert stored.only_run().info.end_time == run.info.end_time


def test_only_what_the_run_lacks_is_written(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow.set_tracking_uri(AWAY)
    train(tmp_path / "j")
    (path,) = (tmp_path / "j").glob("*.jsonl")
    records = list(read_journal(path))
    (first,) = [record for record in records if isinstance(record, Quantities) and record.step == 10]
    # The run was started and one point arrived; the answers to both requests were lost.
    segment_tag = {"mlflow_tokens.segment": path.stem}
    run_id = stored.client.create_run("0", tags=segment_tag).info.run_id
    point = Metric("tokens/computed", 100.0, round(first.t_wall * 1000), 10)
    stored.client.log_batch(run_id, [point], synchronous=True)
    assert sync(path, "--tracking-uri", stored.uri) == 0
    assert stored.only_run().info.run_id == run_id
    assert points(stored) == EXPECTED
    total = sum(len(points(stored, name)) for name in stored.metrics())
    assert f"{total - 1} points written" in capsys.readouterr().out
    # From now on the journal bears the name of the run.
    assert [item.stem for item in (tmp_path / "j").glob("*.jsonl")] == [run_id]


def test_a_job_that_died_without_a_word_is_killed_as_of_its_last_record(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mlflow.start_run() as run:
        pass
    stored.client.update_run(run.info.run_id, status="RUNNING")
    journal = Journal(tmp_path / "j" / f"{run.info.run_id}.jsonl")
    for record in (
        segment("a"),
        price("3600 USD/device-hour"),
        RunBound(run.info.run_id, stored.uri),
        quantities("a", seq=1, step=10, position=10, computed=160, train=10.0, t_wall=1_700_000_000.0),
        quantities("a", seq=2, step=15, position=15, computed=240, train=15.0, t_wall=1_700_000_005.5),
    ):
        journal.append(record)
    # While the job lives, its journal is left alone.
    assert sync(tmp_path / "j") == 0
    assert "a job is writing it" in capsys.readouterr().out
    assert stored.metrics() == {}
    journal.close()
    assert sync(tmp_path / "j") == 0
    assert points(stored, "cost/total") == [(10, 10.0), (15, 15.0)]
    assert stored.only_run().info.status == "KILLED"
    assert stored.only_run().info.end_time == 1_700_000_005_500
    # Another process of the same run that died before it had anything to write.
    stored.client.update_run(run.info.run_id, status="RUNNING")
    again = Journal(tmp_path / "j" / f"{run.info.run_id}.jsonl")
    again.append(RunBound(run.info.run_id, stored.uri))
    again.close()
    assert sync(tmp_path / "j") == 0
    assert stored.only_run().info.status == "KILLED"
    # Nothing is left to be done, and it says so without asking anybody.
    assert sync(tmp_path / "j", "--tracking-uri", AWAY) == 2
    capsys.readouterr()
    assert sync(tmp_path / "j") == 0
    assert ": 0 points written\n" in capsys.readouterr().out


def test_what_cannot_be_done_is_said_and_the_rest_is_done(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow.set_tracking_uri(AWAY)
    train(tmp_path / "j", steps=10)
    mlflow.set_tracking_uri(stored.uri)
    (tmp_path / "j" / "a-torn.jsonl").write_bytes(b"00000000 {")
    (tmp_path / "j" / "b-foreign.jsonl").write_text('{"loss": 1}\n')
    assert sync(tmp_path / "j") == 2
    captured = capsys.readouterr()
    assert captured.out.count("it holds no numbers") == 2
    assert "MlflowException" in captured.err and "127.0.0.1" in captured.err
    assert sync(tmp_path / "j", "--tracking-uri", stored.uri) == 0
    assert points(stored) == [(10, 100.0), (10, 100.0)]  # step 10 and, at another time, the end


def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sync(tmp_path / "nowhere") == 2
    assert "there is no directory" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert sync(tmp_path / "empty") == 0
    assert "There is no journal" in capsys.readouterr().out


def test_a_database_that_is_not_here_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stored: Stored
) -> None:
    train(tmp_path / "j", steps=10)
    assert sync(tmp_path / "j", "--tracking-uri", f"sqlite:///{tmp_path}/typo.db") == 2
    assert "there is no database" in capsys.readouterr().err
    assert not (tmp_path / "typo.db").exists()
