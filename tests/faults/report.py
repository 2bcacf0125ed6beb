"""The report of a long run, for docs/faults.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.faults.check import LONGEST_CALL, LONGEST_EXIT, LONGEST_HISTORY, LONGEST_STANDSTILL, TO_JOURNAL
from tests.faults.runner import SIDE_BY_SIDE, Result
from tests.faults.scenario import KINDS

#: What each kind of fault is, for the table.
MEANING = {
    "refuse": "nobody listens at the server's address",
    "crash": "the server goes down with a request in its hands",
    "hang": "the server takes requests and never answers",
    "late": "as before, and does them when nobody waits any more",
    "slow": "answers take 0.1 to 1 s",
    "http500": "answers of 500",
    "http503": "answers of 503",
    "http429": "answers of 429 with Retry-After",
    "html": "a login page instead of an answer",
    "cut_before": "the connection breaks before the server has the request",
    "cut_after": "the server does it, the answer is lost",
    "cut_within": "the server does it, half an answer comes",
    "disk_full": "no room for the journal, then room again",
    "disk_full_for_good": "no room for the journal any more",
    "unwritable": "the journal's directory cannot be made",
    "clock_forward": "the wall clock jumps ahead by up to an hour",
    "clock_back": "the wall clock jumps back by up to an hour",
    "corrupt": "bits flipped in records between two lifetimes",
    "torn": "the journal's last line is torn",
    "lost": "the journal is gone, only MLflow has the history",
    "kill": "kill -9 at a step",
    "kill_in_request": "kill -9 while a request is under way",
    "terminate": "SIGTERM at a step",
    "terminate_in_flush": "SIGTERM while the last flush hangs",
    "terminate_then_kill": "SIGTERM in the last flush, then kill -9",
    "os_exit": "os._exit",
    "exception": "an exception that nobody catches",
    "interrupt": "SIGINT",
    "kill_other": "kill -9 of a rank other than 0",
    "kill_first": "kill -9 of rank 0, the launcher ends the others",
    "terminate_all": "SIGTERM to all ranks",
    "second_job": "the job is started twice on one run",
    "sync_meanwhile": "mlflow-tokens sync while the job trains",
}


def write_report(path: Path, results: Sequence[Result], seconds: float) -> None:
    """What was injected, what was checked, and how it went."""
    injected: Counter[str] = Counter()
    requests: Counter[str] = Counter()
    for result in results:
        injected += result.injected
        requests += result.requests
    calls = sorted(call for result in results for call in result.verdict.calls)
    blocked = sorted(still for result in results for still in result.verdict.blocked)
    lost = sorted(max(0, steps) for result in results for steps in result.verdict.lost)
    failed = [result for result in results if not result.passed]
    seeds = [result.scenario.seed for result in results]
    lines = [
        "# Faults injected, and what became of the numbers",
        "",
        f"Written by `make faults` (seeds {min(seeds)} to {max(seeds)}): {injected.total():,} faults in "
        f"{len(results):,} cases, {sum(result.processes for result in results):,} training processes, "
        f"{sum(result.steps for result in results):,} steps, {requests.total():,} requests, in "
        f"{seconds / 60:.0f} minutes on 2 cores, {SIDE_BY_SIDE} cases side by side. "
        f"**Failed cases: {len(failed)}.**",
        "",
        "Each case trains a tiny model in real processes against a real `mlflow server` behind a proxy that "
        "fails on purpose, in one to three lifetimes of the job, then runs `mlflow-tokens sync` twice. The "
        "same seed draws the same case: `python -m tests.faults --seed N`. A fault is counted when it took "
        "effect: a request met it, the process died of it, the file was damaged. One that was drawn and met "
        "nobody is not. The full disk is a limit on the size of files in the training process, and its clock "
        "is set by replacing `time.time` there. What a dead process had asked the server for is done before "
        "the next one starts: a request that overtakes it by seconds is not among the faults.",
        "",
        "| fault | what happens | times |",
        "|---|---|---:|",
        *(f"| `{kind}` | {MEANING[kind]} | {injected[kind]:,} |" for kind in KINDS),
        "",
        "Checked after every case:",
        "",
        "- nothing was raised by a call of ours, and training reached the step that it should;",
        f"- no call of ours took {LONGEST_CALL:.0f} s and stood still for {LONGEST_STANDSTILL:.0f} s of "
        f"them, and no process took longer than {LONGEST_EXIT:.0f} s to end;",
        "- every point that follows from the journal is in MLflow exactly once, and none of ours is there "
        "that does not;",
        "- tokens, effective tokens (what a rollback took back does not count), device-hours and cost at "
        "every point equal a ledger kept by hand in the training process, which shares no code with the "
        "package;",
        "- the time between two lifetimes is billed if the machines were held, shown as a gap if not, and "
        "equals what the processes' own clocks say;",
        "- MLflow's latest values are those of the last record;",
        "- a second `sync` writes 0 points;",
        "- the run has ended as the process did, and is not left RUNNING;",
        "- where no journal could be written and the server could be reached, the last step's totals are in "
        "MLflow;",
        "- the second of two jobs on one run says so and logs to a run of its own, and both runs are right;",
        "- a process that could say goodbye has recorded its last step; one that was killed without a word "
        "has lost fewer steps than two snapshot intervals have, once the snapshot that was due is waited "
        f"for, and otherwise but for the steps of its last {TO_JOURNAL:.0f} s "
        f"({TO_JOURNAL + LONGEST_HISTORY:.0f} s where MLflow or another rank is asked first).",
        "",
        "Accepted, and not counted as failures:",
        "",
        "- after damage to a journal, or where it is lost, totals that are unknown from there on (never ones "
        "that are wrong), and rates of an earlier process that only follow since the record before is gone;",
        "- a run that stays RUNNING because its process was killed and no journal knows of it (lost, not "
        "writable, or the process died before its first record), or because the script could not end the run "
        "it had started itself;",
        "- FINISHED after an exception that nobody catches, where the tracker is no context manager and "
        "`autolog` is not used.",
        "",
        f"{sum(result.verdict.points for result in results):,} points of "
        f"{sum(result.verdict.runs for result in results):,} runs were compared.",
        "",
        f"Of {len(lost):,} processes killed without a warning, half lost no more than {_middle(lost)} "
        f"finished steps, which no snapshot had reached; the most were {max(lost, default=0)}. "
        + ("" if failed else "Nothing that they had recorded was lost or wrong."),
        "",
        "Time in our calls (`count`, `step`, `state_dict`, `load_state_dict`, `Tracker`) on the training "
        f"thread, {len(calls):,} calls, on a machine that ran other cases meanwhile: "
        f"median {_percentile(calls, 50)}, 95 % within {_percentile(calls, 95)}, 99 % within "
        f"{_percentile(calls, 99)}, the longest {_percentile(calls, 100)}; of that, standing still (not "
        f"waiting for a core) 95 % within {_percentile(blocked, 95)}, the longest "
        f"{_percentile(blocked, 100)}.",
        "",
    ]
    if failed:
        lines += ["Failed seeds: " + ", ".join(str(result.scenario.seed) for result in failed), ""]
    path.write_text("\n".join(lines), "utf-8")


def _middle(ordered: Sequence[int]) -> int:
    return ordered[len(ordered) // 2] if ordered else 0


def _percentile(ordered: Sequence[float], percent: int) -> str:
    if not ordered:
        return "-"
    return f"{1000 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]:.2f} ms"
