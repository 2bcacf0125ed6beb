"""A job that is killed before its first record, and what is known of the run when it is resumed.

Every step has 10 computed and 8 valid tokens; steps are counted by hand.
"""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest

from mlflow_tokens.account import Account, account_of
from mlflow_tokens.aggregate import Moment
from mlflow_tokens.checkpoint import Checkpoint
from mlflow_tokens.clock import PHASES
from mlflow_tokens.journal import read_journal
from mlflow_tokens.meter import Reading
from mlflow_tokens.ranks import Question
from mlflow_tokens.recorder import Recorder
from mlflow_tokens.records import Record, RunBound
from mlflow_tokens.resume import past_records
from tests.journals import quantities, segment

RUN = "r" * 32

Latest = dict[str, tuple[float, int, int]]


class History:
    """What MLflow says of the run: `latest` is a function, so that it can fail or wait."""

    def __init__(self, latest: Callable[[], Latest]) -> None:
        self._latest = latest

    def latest(self, but: AbstractSet[int] = frozenset()) -> Latest:
        return {name: point for name, point in self._latest().items() if point[2] not in but}

    def at(self, timestamp_ms: int) -> Mapping[str, float]:
        return {}

    def tags(self) -> Mapping[str, str]:
        return {}


def collect(question: Question, timeout: float) -> dict[int, Reading]:
    """The process has trained as many steps as it is asked for, a second each."""
    step = question.step
    seconds = {phase: float(step) if phase == "train" else 0.0 for phase in PHASES}
    return {0: Reading(0, step, step, 10 * step, 8 * step, 8 * step, seconds)}


def recorder_on(folder: Path, name: str, checkpoint: Checkpoint | None = None) -> Recorder:
    return Recorder(
        segment=segment(name),
        price=None,
        bound=RunBound(RUN, "unused"),
        journal_path=folder / f"{RUN}.jsonl",
        collect=collect,
        baseline={},
        checkpoint=checkpoint,
        position=lambda: 0,
        now=lambda: 0.0,
    )


def take(recorder: Recorder, steps: int) -> None:
    """The process trains so many steps and ends."""
    recorder.end(Moment("final", Question(steps, live=True), steps, recorder.wall(), 0.0))


def account_in(folder: Path) -> Account:
    return account_of(read_journal(folder / f"{RUN}.jsonl"))


def latest_of(steps: int) -> Latest:
    """What MLflow shows of a run of which so many steps have reached it."""
    return {
        "tokens/computed": (10.0 * steps, steps, 0),
        "tokens/valid": (8.0 * steps, steps, 0),
        "tokens/effective": (8.0 * steps, steps, 0),
        "device/hours": (steps / 3600, steps, 0),
        "throughput/tokens_per_second_wall": (10.0, steps, 0),
        "throughput/tokens_per_second_average": (10.0, steps, 0),
        "throughput/tokens_per_second_per_device_average": (10.0, steps, 0),
    }


def fails() -> Latest:
    raise ConnectionError("refused")


def killed_while_mlflow_is_asked(folder: Path, checkpoint: Checkpoint) -> None:
    """Leave the journal as it is while the process waits for MLflow to say what it has."""
    alive, asked, answer = folder / "alive", threading.Event(), threading.Event()
    shutil.copytree(folder / "journal", alive)

    def latest() -> Latest:
        asked.set()
        assert answer.wait(30)
        return latest_of(35)

    recorder = recorder_on(alive, "b", checkpoint)
    recorder.start([], lambda run: History(latest))
    assert asked.wait(30)
    shutil.copytree(alive, folder / "left")
    answer.set()
    take(recorder, 5)


def killed_before_its_first_snapshot(folder: Path, checkpoint: Checkpoint) -> None:
    alive = folder / "alive"
    shutil.copytree(folder / "journal", alive)
    recorder = recorder_on(alive, "b", checkpoint)
    recorder.start([], lambda run: History(lambda: latest_of(35)))
    with recorder.spool.changed:
        assert recorder.spool.changed.wait_for(lambda: recorder.spool.begun, 30)
    shutil.copytree(alive, folder / "left")
    take(recorder, 5)


@pytest.mark.parametrize("killed", [killed_while_mlflow_is_asked, killed_before_its_first_snapshot])
@pytest.mark.parametrize(
    "latest",
    [lambda: latest_of(35), lambda: latest_of(10), dict, fails],
    ids=["all of it", "10 steps of it", "nothing", "no answer"],
)
def test_what_the_journal_has_is_kept_whatever_mlflow_has(
    tmp_path: Path, killed: Callable[[Path, Checkpoint], None], latest: Callable[[], Latest]
) -> None:
    """35 steps; a second process goes back to step 20, saves step 25 and is killed; a third goes on there."""
    first = recorder_on(tmp_path / "journal", "a")
    first.start([], None)
    first.put(Moment("checkpoint", Question(20), 20, first.wall(), 0.0))
    take(first, 35)
    killed(tmp_path, Checkpoint(RUN, "a", 20, 20, 0))

    third = recorder_on(tmp_path / "left", "c", Checkpoint(RUN, "b", 25, 25, 0))
    third.start([], lambda run: History(latest))
    take(third, 4)
    account = account_in(tmp_path / "left")
    # The five steps that led to the checkpoint were never recorded: what has survived is not known.
    assert (account.computed, account.valid, account.trained) == (390, 312, 312)
    assert account.effective is None
    assert account.step == 29
    # 35 s and 4 s.
    assert account.device_seconds_total == 39.0


def test_a_journal_that_has_never_seen_the_checkpoints_process_is_not_taken_for_complete(
    tmp_path: Path,
) -> None:
    """The run went on elsewhere, and nothing of that has reached MLflow."""
    first = recorder_on(tmp_path, "a")
    first.start([], None)
    take(first, 35)
    third = recorder_on(tmp_path, "c", Checkpoint(RUN, "elsewhere", 50, 50, 0))
    third.start([], lambda run: History(dict))
    take(third, 4)
    account = account_in(tmp_path)
    assert (account.computed, account.effective, account.cost) == (None, None, None)


@pytest.mark.parametrize(
    "latest",
    [
        {"tokens/computed": (350.0, 35, 0)},
        latest_of(35) | {"tokens/computed": (math.nan, 35, 0)},
    ],
    ids=["totals of a checkpoint alone", "totals that were unknown"],
)
def test_a_past_of_which_mlflow_says_too_little_is_unknown_not_zero(tmp_path: Path, latest: Latest) -> None:
    """Nobody has the journal of the first process, or a checkpoint."""
    recorder = recorder_on(tmp_path, "a")
    recorder.start([], lambda run: History(lambda: latest))
    take(recorder, 4)
    account = account_in(tmp_path)
    assert (account.computed, account.effective) == (None, None)
    assert account.high_water == 35


def test_what_mlflow_has_of_less_than_the_checkpoint_is_not_its_past(tmp_path: Path) -> None:
    """The journal is lost, ten steps reached MLflow, and the process trained on to a checkpoint at 21."""
    recorder = recorder_on(tmp_path, "b", Checkpoint(RUN, "a", 21, 21, 1_000))
    recorder.start([], lambda run: History(lambda: latest_of(10)))
    take(recorder, 4)
    account = account_in(tmp_path)
    assert (account.computed, account.effective, account.device_seconds_total) == (None, None, 4.0)
    assert account.cost is None


def test_a_run_that_is_further_than_the_journal_is_unknown_where_mlflow_falls_silent() -> None:
    """It says that it has 50 steps where the journal has 35, and then nothing more."""
    answers: list[Callable[[], Latest]] = [lambda: latest_of(50), fails]
    records: list[Record] = [segment("a"), quantities("a", step=35, position=35, computed=350, valid=280)]
    account = account_of(records)
    assert account.computed == 350
    past = past_records(
        account,
        None,
        run=RUN,
        segment="b",
        now=0.0,
        directory=Path("unused"),
        history_of=lambda run: History(answers.pop(0)),
    )
    assert account_of([*records, *past]).computed is None
