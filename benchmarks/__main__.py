"""`python -m benchmarks`: measures what docs/benchmarks.md says, and writes it anew."""

from __future__ import annotations

import datetime
import os
import platform
import tempfile
from pathlib import Path

import mlflow
from rich.console import Console

from benchmarks import accelerated, counting, live, ranks
from tests.servers import mlflow_server

REPORT = Path(__file__).parent.parent / "docs" / "benchmarks.md"


def main() -> None:
    """Run everything; it takes about seven minutes."""
    lines: list[tuple[str, str, str]] = []
    with tempfile.TemporaryDirectory() as name, Console(stderr=True).status("measuring") as status:
        folder = Path(name)
        status.update("what emitting a snapshot costs the training thread")
        for text, between in (("at once", _nothing), ("after 2 ms of reading memory", live.cold_caches())):
            for what, value in live.emit(folder, between=between).items():
                limit = "50" if what.startswith("a snapshot") else ""
                lines.append((f"training thread, {text}: {what}, µs", f"{value:.1f}", limit))
        status.update("counting a micro-batch, on two ranks")
        lines += [(f"counting, {what}", value, limit) for what, value, limit in counting.measure()]
        status.update("readings of up to 4,096 ranks")
        lines += ranks.measure()
        status.update("memory, rows and the journal of a million steps")
        lines.append(
            (
                "memory of account and spool at a million steps, a checkpoint every 100, MiB",
                f"{accelerated.memory():.1f}",
                "64",
            )
        )
        peak, begun, read = accelerated.restart()
        lines.append(("memory of a restart after that, no sink having any of it, MiB", f"{peak:.1f}", "64"))
        lines.append(("the same: until the journal is read, s", f"{begun:.1f}", ""))
        lines.append(("the same: until a sink has read all of it, s", f"{read:.1f}", ""))
        for text, every, rollback in (
            ("two weeks, a million steps, a checkpoint every 1,500 (half an hour)", 1500, False),
            ("the same with a checkpoint every 100 and a rollback by a day", 100, True),
        ):
            rows = accelerated.rows(checkpoint_every=every, rollback=rollback)
            lines.append((f"rows in MLflow: {text}", f"{rows:,}", "60,000"))
        lines.append(
            (
                "journal of a million steps, a checkpoint every 100, MiB",
                f"{accelerated.journal_size():.1f}",
                "64",
            )
        )
        status.update("open files")
        before, most, after = live.files(folder)
        lines.append(
            (
                "open files before, at most during, and after each of three runs with every sink",
                f"{before}, {most}, {'/'.join(map(str, after))}",
                "",
            )
        )
        uri = f"sqlite:///{folder}/cpu.db"
        status.update("CPU of our threads, into sqlite")
        lines += _cpu("sqlite", live.cpu(folder, uri))
        status.update("CPU of our threads, into a server")
        with mlflow_server(f"sqlite:///{folder}/server.db", folder) as address:
            lines += _cpu("a server", live.cpu(folder, address))
    REPORT.write_text(_report(lines), "utf-8")
    print(_report(lines))


def _nothing() -> None:
    pass


def _cpu(where: str, used: dict[str, float]) -> list[tuple[str, str, str]]:
    limits = {"mlflow_tokens-MLflow": "1"}
    return [
        (
            f"CPU of thread {name.removeprefix('mlflow_tokens-')}, 1 snapshot/s into {where}, % of a core",
            f"{percent:.2f}",
            limits.get(name, ""),
        )
        for name, percent in used.items()
        if name != "mlflow_tokens-signals"
    ]


def _report(lines: list[tuple[str, str, str]]) -> str:
    head = (
        "# Benchmarks\n\n"
        f"`python -m benchmarks` on {datetime.date.today()}: {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, MLflow {mlflow.__version__}. Timings vary with the machine; nothing "
        "tests them.\n\n| what | measured | limit |\n| --- | ---: | ---: |\n"
    )
    return head + "".join(f"| {what} | {value} | {limit} |\n" for what, value, limit in lines)


if __name__ == "__main__":
    main()
