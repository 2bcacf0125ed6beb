"""MLflow does not say what it has of a run's past when the run goes on, and does later.

The journal of the first 35 steps is lost. Every step has 10 computed and 8 valid tokens; steps are counted
by hand. While MLflow is silent totals are absent: 0 and up would look like those of a new run.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import mlflow
import pytest

from mlflow_tokens.aggregate import Moment
from mlflow_tokens.checkpoint import Checkpoint
from mlflow_tokens.cli import main
from mlflow_tokens.journal import read_journal
from mlflow_tokens.ledger import Ledger
from mlflow_tokens.ranks import Question
from mlflow_tokens.recorder import Rewind
from mlflow_tokens.records import Record
from mlflow_tokens.resume import History as AskedHistory
from tests.conftest import Stored
from tests.jobs import recorded
from tests.journals import quantities, segment
from tests.servers import Relay, mlflow_server, relay
from tests.test_resume import check_totals, crash_at_35, start, steps
from tests.test_resume_killed import RUN, History, Latest, account_in, fails, latest_of, recorder_on, take


class Line:
    """A server that can be reached, or not."""

    def __init__(self, between: Relay) -> None:
        self._between = between
        self.address = between.address

    def cut(self, cut: bool = True) -> None:
        self._between.fails = lambda _: cut


@pytest.fixture
def line(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    with mlflow_server(store, tmp_path, app=None) as address, relay(address) as between:
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        yield Line(between)


def totals_in(path: Path) -> list[float]:
    """`tokens/computed` of every line of the JSONL sink. The first line of the file has the tags."""
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    return [json.loads(text)["metrics"]["tokens/computed"] for text in lines]


def until_recorded(journals: Path) -> None:
    """Wait for the first snapshot."""
    until(lambda: recorded(journals))


def until(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_totals_wait_for_the_answer_and_are_complete_once_it_is_there(
    stored: Stored, line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_checkpoint: bool
) -> None:
    state = crash_at_35(tmp_path / "lost")
    run = stored.only_run().info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", run)
    mlflow.set_tracking_uri(line.address)
    line.cut()
    tracker = start(tmp_path / "new", jsonl=tmp_path / "seen.jsonl")
    if with_checkpoint:
        tracker.load_state_dict(state | {"run": run})
    steps(tracker, 10)
    until_recorded(tmp_path / "new")
    line.cut(False)
    steps(tracker, 5)
    tracker.close()
    # What was recorded at the tenth step is written with the totals of that step, too.
    assert totals_in(tmp_path / "seen.jsonl") == [450, 500]
    check_totals(stored.metrics(), 50, 35 if with_checkpoint else 50)


def test_what_never_got_an_answer_gets_it_from_sync(
    stored: Stored, line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash_at_35(tmp_path / "lost")
    before = stored.points("tokens/computed")
    monkeypatch.setenv("MLFLOW_RUN_ID", stored.only_run().info.run_id)
    mlflow.set_tracking_uri(line.address)
    line.cut()
    tracker = start(tmp_path / "new")
    steps(tracker, 15)
    tracker.close()
    assert stored.points("tokens/computed") == before
    line.cut(False)
    shutil.copytree(tmp_path / "new", tmp_path / "copy")
    for folder in ("copy", "copy", "new"):
        assert main(["sync", str(tmp_path / folder)]) == 0
        # Below step 35, which the run has reached, totals are at that step.
        assert stored.points("tokens/computed") == [*before, (35, 450.0), (35, 500.0)]
        check_totals(stored.metrics(), 50, 50)


def test_a_run_that_the_script_has_just_started_needs_no_answer(
    stored: Stored, line: Line, tmp_path: Path
) -> None:
    mlflow.set_tracking_uri(line.address)
    mlflow.start_run()
    line.cut()
    tracker = start(tmp_path / "new", jsonl=tmp_path / "seen.jsonl")
    steps(tracker, 10)
    until(lambda: totals_in(tmp_path / "seen.jsonl") == [100])
    line.cut(False)
    tracker.close()
    mlflow.end_run()
    check_totals(stored.metrics(), 10, 10)


def test_a_run_that_the_script_has_resumed_needs_one(stored: Stored, line: Line, tmp_path: Path) -> None:
    crash_at_35(tmp_path / "lost")
    mlflow.set_tracking_uri(line.address)
    mlflow.start_run(run_id=stored.only_run().info.run_id)
    line.cut()
    tracker = start(tmp_path / "new", jsonl=tmp_path / "seen.jsonl")
    steps(tracker, 10)
    until_recorded(tmp_path / "new")
    line.cut(False)
    tracker.close()
    mlflow.end_run()
    assert totals_in(tmp_path / "seen.jsonl") == [450, 450]
    check_totals(stored.metrics(), 45, 45)


def test_a_run_that_turns_out_to_be_empty_begins_at_0(
    stored: Stored, line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stored.client.create_run("0").info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", run)
    mlflow.set_tracking_uri(line.address)
    line.cut()
    tracker = start(tmp_path / "new", jsonl=tmp_path / "seen.jsonl")
    steps(tracker, 10)
    until_recorded(tmp_path / "new")
    line.cut(False)
    tracker.close()
    check_totals(stored.metrics(), 10, 10)
    assert stored.metrics()["cost/total"] > 0


# ---- on the recorder alone --------------------------------------------------------------------------------


def asking(
    latest: Callable[[], Latest],
) -> Callable[[Callable[[AskedHistory], list[Record]]], Future[list[Record]]]:
    """Answers at once."""

    def ask(question: Callable[[AskedHistory], list[Record]]) -> Future[list[Record]]:
        future: Future[list[Record]] = Future()
        try:
            future.set_result(question(History(latest)))
        except ConnectionError as error:
            future.set_exception(error)
        return future

    return ask


def silent(run: str) -> History:
    return History(fails)


def test_the_next_process_asks_again(tmp_path: Path) -> None:
    first = recorder_on(tmp_path, "a")
    first.start([], silent, asking(fails))
    take(first, 4)
    assert account_in(tmp_path).computed is None
    second = recorder_on(tmp_path, "b")
    second.start([], silent, asking(lambda: latest_of(35)))
    take(second, 3)
    account = account_in(tmp_path)
    assert (account.computed, account.effective) == (350 + 40 + 30, 280 + 32 + 24)
    assert account.device_seconds_total == 35 + 4 + 3


def test_what_mlflow_has_of_less_than_the_checkpoint_stays_unknown(tmp_path: Path) -> None:
    first = recorder_on(tmp_path, "a", Checkpoint(RUN, "z", 50, 50, 1_000))
    first.start([], silent, asking(fails))
    take(first, 4)
    second = recorder_on(tmp_path, "b")
    second.start([], silent, asking(lambda: latest_of(35)))
    take(second, 3)
    assert account_in(tmp_path).computed is None


def test_a_rollback_while_mlflow_was_silent_is_known_in_the_end(tmp_path: Path) -> None:
    """35 steps, 6 more, back to the 2nd of these, 3 more: 44 computed, 40 left."""
    recorder = recorder_on(tmp_path, "a")
    recorder.start([], silent, asking(lambda: latest_of(35)))
    recorder.put(Moment("checkpoint", Question(2), 2, recorder.wall(), 0.0))
    before = Moment("checkpoint", Question(6), 6, recorder.wall(), 0.0)
    recorder.put(Rewind(Checkpoint(RUN, "a", 2, 2, 0), before))
    take(recorder, 9)
    account = account_in(tmp_path)
    assert (account.computed, account.effective) == (440, 8 * 40)


def test_nothing_of_a_run_whose_past_is_open_is_logged_that_would_be_taken_for_its_past(
    tmp_path: Path,
) -> None:
    recorder = recorder_on(tmp_path, "a")
    recorder.start([], silent, asking(fails))
    take(recorder, 4)
    ledger = Ledger()
    for record in read_journal(tmp_path / f"{RUN}.jsonl"):
        ledger.apply(record)
    ledger.apply(segment("b"))
    # Ten hours after the last record, of which it is not known whether they were paid.
    after = quantities("b", t_wall=time.time() + 36_000, train=1.0, computed=10, valid=8, rewinds=1)
    snapshot = ledger.apply(after)
    assert snapshot is not None
    assert snapshot.metrics == {}
