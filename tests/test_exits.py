"""Every way in which a training process ends: what has arrived by then, and what `sync` brings after it.

Real processes run tests/scripts/train.py through autolog. The script says its own recount, made with plain
loops over plain lists, after every step; all figures are compared to that.
"""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from mlflow.entities import Run

from mlflow_tokens import cli
from tests.conftest import Stored
from tests.jobs import ForkServer, Job, recorded

STEPS = 23  # the last snapshot before the end is that of step 20
KINDS = ("computed", "valid", "trained")


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def journal(store: str, tmp_path: Path) -> Path:
    return tmp_path / "journal"


def totals(run: Run) -> tuple[float | None, ...]:
    return tuple(run.data.metrics.get(f"tokens/{kind}") for kind in KINDS)


def counted(*recounts: dict[str, int]) -> tuple[int, ...]:
    """The sum over the ranks."""
    return tuple(sum(recount[kind] for recount in recounts) for kind in KINDS)


def sync(capsys: pytest.CaptureFixture[str], journal: Path, *arguments: str) -> str:
    """What `mlflow-tokens sync` prints, and that doing it again writes nothing."""
    capsys.readouterr()
    assert cli.main(["sync", str(journal), *arguments]) == 0
    first = capsys.readouterr().out
    assert cli.main(["sync", str(journal), *arguments]) == 0
    assert ": 0 points written" in capsys.readouterr().out
    return first


def every_point_once(stored: Stored, journal: Path, run_id: str | None = None) -> None:
    """The store has exactly the points that the journal has, read without the package."""
    records = recorded(journal)
    assert records
    for kind in KINDS:
        expected = [(record["position"], record["tokens"][kind]) for record in records]
        assert stored.points(f"tokens/{kind}", run_id) == expected


# ---- ends that the process sees -----------------------------------------------------------------------


@pytest.mark.parametrize("own_run", [False, True], ids=["our run", "the script's run"])
@pytest.mark.parametrize(
    ("end", "sent", "exit_status", "status"),
    [
        pytest.param("return", None, 0, "FINISHED", id="returns"),
        pytest.param("raise", None, 1, "FAILED", id="raises"),
        pytest.param("exit", None, 3, "FAILED", id="sys.exit(3)"),
        pytest.param("interrupt", None, -signal.SIGINT, "KILLED", id="SIGINT"),
        pytest.param("sleep", signal.SIGTERM, -signal.SIGTERM, "KILLED", id="SIGTERM"),
        pytest.param("sleep", signal.SIGHUP, -signal.SIGHUP, "KILLED", id="SIGHUP"),
        pytest.param("stuck", signal.SIGTERM, -signal.SIGTERM, "KILLED", id="SIGTERM while stuck in C"),
    ],
)
def test_an_end_that_is_seen_leaves_nothing_to_be_done(
    *,
    forks: ForkServer,
    stored: Stored,
    journal: Path,
    tmp_path: Path,
    end: str,
    sent: signal.Signals | None,
    exit_status: int,
    status: str,
    own_run: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = forks.start(f"--end={end}", *["--own-run"] * own_run, cwd=tmp_path)
    if sent is not None:
        job.until_said("RECOUNT")
        job.send(sent)
    assert job.wait() == exit_status, job.output()
    run = stored.only_run()
    assert run.info.status == status
    assert (run.info.run_name == "mine") is own_run
    (recount,) = job.recounts("RECOUNT")
    assert recount["step"] == STEPS
    assert totals(run) == counted(recount)
    every_point_once(stored, journal)
    assert "0 points written" in sync(capsys, journal)
    assert stored.only_run().info.status == status


def test_sigterm_in_full_flight_counts_up_to_the_step_it_came_in(
    forks: ForkServer, stored: Stored, journal: Path, tmp_path: Path
) -> None:
    job = forks.start("--say-steps", "--end=train", cwd=tmp_path)
    job.until(lambda: len(job.recounts()) > STEPS, "training")
    said = len(job.recounts())
    job.send(signal.SIGTERM)
    assert job.wait() == -signal.SIGTERM
    run = stored.only_run()
    assert run.info.status == "KILLED"
    last = recorded(journal)[-1]
    assert last["step"] >= said
    (recount,) = (recount for recount in job.recounts() if recount["step"] == last["step"])
    assert totals(run) == counted(recount)
    every_point_once(stored, journal)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    ("end", "sent", "exit_status", "status"),
    [
        pytest.param("raise", None, 1, "FAILED", id="raises"),
        pytest.param("sleep", signal.SIGTERM, -signal.SIGTERM, "KILLED", id="SIGTERM"),
    ],
)
def test_an_end_before_the_first_snapshot_does_not_leave_the_scripts_run_running(
    *,
    forks: ForkServer,
    stored: Stored,
    tmp_path: Path,
    end: str,
    sent: signal.Signals | None,
    exit_status: int,
    status: str,
    steps: int,
) -> None:
    job = forks.start("--own-run", f"--steps={steps}", f"--end={end}", cwd=tmp_path)
    if sent is not None:
        job.until_said("RECOUNT")
        job.send(sent)
    assert job.wait() == exit_status, job.output()
    run = stored.only_run()
    assert (run.info.run_name, run.info.status) == ("mine", status)
    assert totals(run) == (counted(*job.recounts("RECOUNT")) if steps else (None, None, None))


# ---- ends that nobody sees ----------------------------------------------------------------------------


@pytest.mark.parametrize("own_run", [False, True], ids=["our run", "the script's run"])
@pytest.mark.parametrize(
    ("end", "exit_status"),
    [pytest.param("os-exit", 3, id="os._exit"), pytest.param("kill", -signal.SIGKILL, id="kill -9")],
)
def test_an_end_that_nobody_sees_is_made_good_by_sync(
    *,
    forks: ForkServer,
    stored: Stored,
    journal: Path,
    tmp_path: Path,
    end: str,
    exit_status: int,
    own_run: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gate = a_gate(tmp_path)
    job = forks.start("--say-steps", f"--end={end}", f"--gate={gate}", *["--own-run"] * own_run, cwd=tmp_path)
    job.until_recorded("step", 20, journal)
    gate.write_text("go")
    assert job.wait() == exit_status, job.output()
    assert {run.info.status for run in stored.runs()} <= {"RUNNING"}
    assert "ended as KILLED" in sync(capsys, journal)
    run = stored.only_run()
    assert run.info.status == "KILLED"
    assert (run.info.run_name == "mine") is own_run
    assert recorded(journal)[-1]["step"] == 20
    assert totals(run) == counted(job.recounts()[19])
    every_point_once(stored, journal)
    assert run.info.end_time == round(recorded(journal)[-1]["t_wall"] * 1000)


def a_gate(folder: Path) -> Path:
    gate = folder / "gate"
    os.mkfifo(gate)
    return gate


# ---- signals that are not ours ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handler", "exit_status", "status"),
    [("before", 0, "FINISHED"), ("after", 0, "FINISHED"), ("chain", -signal.SIGTERM, "KILLED")],
)
def test_a_sigterm_handler_of_the_script_decides(
    *,
    forks: ForkServer,
    stored: Stored,
    journal: Path,
    tmp_path: Path,
    handler: str,
    exit_status: int,
    status: str,
) -> None:
    """It leaves its loop and returns: a job that has finished. Or it hands the signal on to ours."""
    job = forks.start(f"--handler={handler}", "--end=sleep", cwd=tmp_path)
    job.until_said("RECOUNT")
    job.send(signal.SIGTERM)
    assert job.wait() == exit_status, job.output()
    assert job.output().count("SIGTERM, says the script") == 1
    run = stored.only_run()
    assert run.info.status == status
    assert totals(run) == counted(*job.recounts("RECOUNT"))
    every_point_once(stored, journal)


def test_an_event_loop_that_has_come_and_gone_does_not_make_us_deaf(
    forks: ForkServer, stored: Stored, tmp_path: Path
) -> None:
    """It puts its own wake-up descriptor in the place of ours, and leaves none."""
    job = forks.start("--event-loop", "--end=sleep", cwd=tmp_path)
    job.until_said("RECOUNT")
    job.send(signal.SIGTERM)
    assert job.wait() == -signal.SIGTERM
    assert stored.only_run().info.status == "KILLED"
    assert totals(stored.only_run()) == counted(*job.recounts("RECOUNT"))


def test_children_die_of_sigterm_and_do_not_end_the_run(
    forks: ForkServer, stored: Stored, journal: Path, tmp_path: Path
) -> None:
    job = forks.start("--children", cwd=tmp_path)
    assert job.wait() == 0, job.output()
    assert "CHILDREN [-15, 0, 0]" in job.output()
    run = stored.only_run()
    assert run.info.status == "FINISHED"
    assert totals(run) == counted(*job.recounts("RECOUNT"))
    assert [record["kind"] for record in recorded(journal)].count("final") == 1
    every_point_once(stored, journal)


# ---- signals at a bad time ----------------------------------------------------------------------------


def test_sigterm_during_the_last_flush_does_not_lose_the_end(
    forks: ForkServer, stored: Stored, journal: Path, tmp_path: Path
) -> None:
    gate = a_gate(tmp_path)
    job = forks.start(f"--gate={gate}", cwd=tmp_path)
    job.until_recorded("step", 20, journal)
    with closing(sqlite3.connect(stored.uri.removeprefix("sqlite:///"))) as database:
        database.execute("BEGIN EXCLUSIVE")
        gate.write_text("go")
        job.until_recorded("final", STEPS, journal)
        job.send(signal.SIGTERM)
    # The training had ended: whether the process does too before the signal kills it is all the same.
    assert job.wait() in (0, -signal.SIGTERM), job.output()
    run = stored.only_run()
    assert run.info.status == "FINISHED"
    assert totals(run) == counted(*job.recounts("RECOUNT"))
    every_point_once(stored, journal)


def test_sigterm_without_a_server_is_obeyed_soon_and_sync_brings_everything(
    forks: ForkServer, stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as refuses, socket.socket() as is_silent:
        is_silent.bind(("127.0.0.1", 0))
        is_silent.listen()
        refuses.bind(("127.0.0.1", 0))
        jobs: dict[Path, Job] = {}
        for name, server in (("refuses", refuses), ("is_silent", is_silent)):
            folder = tmp_path / name
            folder.mkdir()
            environ = {
                "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{server.getsockname()[1]}",
                "MLFLOW_TOKENS_JOURNAL_DIR": str(folder / "journal"),
            }
            jobs[folder / "journal"] = forks.start("--end=stuck", cwd=folder, **environ)
        for job in jobs.values():
            job.until_said("RECOUNT")
            job.send(signal.SIGTERM)
        for job in jobs.values():
            assert job.wait(30) == -signal.SIGTERM
    assert stored.runs() == []
    for journal, job in jobs.items():
        said = f"`mlflow-tokens sync {journal}` brings it to MLflow."
        assert job.output().count(said) == 1, job.output()
        assert "ended as KILLED" in sync(capsys, journal, f"--tracking-uri={stored.uri}")
        run = stored.runs()[-1]
        assert run.info.status == "KILLED"
        assert totals(run) == counted(*job.recounts("RECOUNT"))
        every_point_once(stored, journal, run.info.run_id)
    assert len(stored.runs()) == len(jobs)


# ---- two processes under Paddle's launcher ------------------------------------------------------------


def newest(job: Job, rank: int) -> dict[str, int]:
    return job.recounts(rank=rank)[-1]


def test_the_launcher_kills_its_workers(
    forks: ForkServer, stored: Stored, journal: Path, tmp_path: Path
) -> None:
    """Rank 0 waits in a barrier that the other never reaches."""
    with forks.launch(2, "--say-steps", "--end=barrier", cwd=tmp_path) as job:
        for rank in (0, 1):
            job.until_said("RECOUNT", rank)
        job.send(signal.SIGTERM)
        assert job.wait() == signal.SIGTERM  # what the launcher makes of it
        run = stored.only_run()
        assert run.info.status == "KILLED"
        assert totals(run) == counted(newest(job, 0), newest(job, 1))
        every_point_once(stored, journal)


def until_stored(job: Job, stored: Stored, journal: Path) -> None:
    """Wait until the snapshot of step 20 is in the journal, and the run in the store."""
    job.until_recorded("step", 20, journal)
    job.until(lambda: stored.runs() and stored.points("tokens/computed"), "a first point")


def test_a_rank_dies(forks: ForkServer, stored: Stored, journal: Path, tmp_path: Path) -> None:
    """The launcher ends the others. The dead one counts with the last that it has said."""
    gate = a_gate(tmp_path)
    arguments = ("--say-steps", "--end=kill", "--end-rank=1", "--others=stuck", f"--gate={gate}")
    with forks.launch(2, *arguments, cwd=tmp_path) as job:
        until_stored(job, stored, journal)
        gate.write_text("go")
        assert job.wait() != 0
        run = stored.only_run()
        assert run.info.status == "KILLED"
        assert newest(job, 0)["step"] == newest(job, 1)["step"] == STEPS
        assert totals(run) == counted(newest(job, 0), job.recounts(rank=1)[19])
        every_point_once(stored, journal)


def test_rank_0_dies(
    *,
    forks: ForkServer,
    stored: Stored,
    journal: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nobody is left to end the run. The same comes of a Gloo that aborts rank 0 when another has died."""
    gate = a_gate(tmp_path)
    arguments = ("--say-steps", "--end=kill", "--end-rank=0", f"--gate={gate}")
    with forks.launch(2, *arguments, cwd=tmp_path) as job:
        until_stored(job, stored, journal)
        gate.write_text("go")
        assert job.wait() != 0
        assert stored.only_run().info.status == "RUNNING"
        assert "ended as KILLED" in sync(capsys, journal)
        run = stored.only_run()
        assert run.info.status == "KILLED"
        assert totals(run) == counted(job.recounts(rank=0)[19], job.recounts(rank=1)[19])
        every_point_once(stored, journal)
