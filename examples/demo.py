"""Train a small GPT three times on the same text, batched in three ways, and rank what its tokens cost.

    python examples/demo.py --directory .demo

Everything it makes is in that directory. What is there already is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

EXPERIMENT = "mlflow_tokens demo"
PRICE = "2.0 CNY/device-hour"
WORKERS = 2
DOCUMENTS = 3200
# Rows of a batch on each worker. A packed row is full, a padded one holds about half as much text: with these
# numbers a step of every run trains about as many tokens, so that the losses can be compared as well.
BATCH_SIZES = {"padded": 8, "grouped": 8, "packed": 4}

console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--directory", type=Path, default=Path(".demo"), help="keep everything here (%(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="forget the runs there are and train again")
    args = parser.parse_args()
    directory = args.directory.resolve()
    # Being asked to stop, like Ctrl-C, has to pass through the `finally` that stops the training as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Stopped."))

    # Without the database the runs are gone, whatever else is still there.
    if args.force or not database(directory).exists():
        forget_runs(directory)
    prepare_text(directory / "data")
    train_all(directory)
    show_ranking(tracking_uri(directory))


def forget_runs(directory: Path) -> None:
    """Remove what the runs left behind; the tokenised text stays, it would come out the same."""
    for name in ("finished", "logs", "mlruns", "visualdl", ".mlflow_tokens"):
        shutil.rmtree(directory / name, ignore_errors=True)
    database(directory).unlink(missing_ok=True)


def prepare_text(directory: Path) -> None:
    """Tokenise the corpus once, here, so that no run is billed for it."""
    from tokenizer import load_documents

    started = time.monotonic()
    with console.status("Reading the corpus, training a tokenizer"):
        documents = load_documents(directory)
    tokens = sum(map(len, documents))
    seconds = time.monotonic() - started
    console.print(
        f"Corpus: {len(documents):,} documents, {tokens:,} tokens ({seconds:.0f} s)", highlight=False
    )


def train_all(directory: Path) -> None:
    """The runs one after the other, a progress bar each. Those which have finished before are skipped."""
    columns = (
        TextColumn("{task.description:<8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[news]}"),
    )
    with Progress(*columns, console=console) as progress:
        rows = {name: progress.add_task(name, start=False, total=None, news="") for name in BATCH_SIZES}
        for name, row in rows.items():
            settings = script_arguments(directory, name)
            finished = directory / "finished" / f"{name}.json"
            if finished.exists() and json.loads(finished.read_text("utf-8")) == settings:
                progress.update(row, total=1, completed=1, news="finished before")
                continue
            progress.start_task(row)
            progress.update(row, news="starting")
            train(directory, name, settings, progress, row)
            progress.stop_task(row)
            finished.parent.mkdir(exist_ok=True)
            finished.write_text(json.dumps(settings), "utf-8")


def script_arguments(directory: Path, name: str) -> list[str]:
    """What the training script is told. All runs get the same documents and pass over them once."""
    return [
        f"--batching={name}",
        f"--batch-size={BATCH_SIZES[name]}",
        f"--documents={DOCUMENTS}",
        f"--data-dir={directory / 'data'}",
        f"--visualdl={directory / 'visualdl' / name}",
        f"--price={PRICE}",
    ]


def train(directory: Path, name: str, settings: list[str], progress: Progress, row: TaskID) -> None:
    """Run the training script on WORKERS processes, showing what its rank 0 prints. Exit if it fails."""
    logs = directory / "logs" / name
    # What an earlier attempt left would be joined to this one's curves.
    for leftover in (logs, directory / "visualdl" / name):
        shutil.rmtree(leftover, ignore_errors=True)
    logs.mkdir(parents=True)
    launch = [
        sys.executable,
        "-m",
        "paddle.distributed.launch",
        f"--nproc_per_node={WORKERS}",
        f"--log_dir={logs}",
    ]
    script = str(Path(__file__).with_name("pretrain_gpt.py").resolve())
    with (logs / "launcher.log").open("w") as launcher_log:
        launcher = subprocess.Popen(
            [*launch, script, *settings],
            cwd=directory,  # MLflow and others put files into the working directory
            env=os.environ | environment(directory, name),
            stdin=subprocess.DEVNULL,
            stdout=launcher_log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes to us alone, and we stop it in order
        )
        try:
            for line in lines_while_running(launcher, logs / "workerlog.0"):
                show(line, name, progress, row)
        finally:
            stop(launcher)
    if launcher.returncode != 0:
        progress.stop()
        explain_failure(name, logs)


def environment(directory: Path, name: str) -> dict[str, str]:
    """Where MLflow logs to, and one thread for each worker: they share the cores."""
    variables = {
        "MLFLOW_TRACKING_URI": tracking_uri(directory),
        "MLFLOW_EXPERIMENT_NAME": EXPERIMENT,
        "MLFLOW_RUN_NAME": name,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    if amd_with_avx2():
        # The MKL in Paddle's CPU wheel takes a slow path on AMD. Told that this is a Haswell, it multiplies
        # matrices two to three times as fast, and the training takes half the time.
        variables["MKL_DEBUG_CPU_TYPE"] = "5"
    return variables


def amd_with_avx2() -> bool:
    processor = Path("/proc/cpuinfo")
    text = processor.read_text() if processor.exists() else ""
    return "AuthenticAMD" in text and " avx2 " in text


def database(directory: Path) -> Path:
    return directory / "mlflow.db"


def tracking_uri(directory: Path) -> str:
    return f"sqlite:///{database(directory)}"


def lines_while_running(process: subprocess.Popen[bytes], path: Path) -> Iterator[str]:
    """The lines of a file which may not exist yet, as they are written, until the process has ended."""
    position, rest, running = 0, "", True
    while running:
        running = process.poll() is None  # asked first: what was written before the end is read after it
        if path.exists():
            with path.open(encoding="utf-8", errors="replace") as log:
                log.seek(position)
                *whole, rest = (rest + log.read()).split("\n")
                position = log.tell()
            yield from whole
        if running:
            time.sleep(0.2)


def show(line: str, name: str, progress: Progress, row: TaskID) -> None:
    """`step 5/200  loss ...` moves the bar; `held out ...` is printed above it."""
    if line.startswith("step "):
        count, _, news = line.removeprefix("step ").partition("  ")
        step, _, steps = count.partition("/")
        progress.update(row, completed=int(step), total=int(steps), news=news)
    elif line.startswith("held out "):
        progress.console.print(f"{name:<8} {line}", highlight=False)


def stop(launcher: subprocess.Popen[bytes]) -> None:
    """End the launcher, if it runs. The workers are in sessions of their own, which only the launcher knows:
    it ends them, by force after 30 s, and must not be killed before it had that time."""
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGINT)
        try:
            launcher.wait(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()


def explain_failure(name: str, logs: Path) -> NoReturn:
    """Show how the log of every worker ends and exit: one of them knows why, the others were only stopped."""
    for log in sorted(logs.glob("workerlog.*")) or [logs / "launcher.log"]:
        tail = log.read_text("utf-8", errors="replace").splitlines()[-20:]
        console.rule(f"the end of {log}", align="left")
        console.print("\n".join(tail), markup=False, highlight=False, soft_wrap=True)
    console.rule()
    sys.exit(f"The run '{name}' failed. What its workers said is above, and in {logs}")


def show_ranking(uri: str) -> None:
    from mlflow_tokens.cli import main as mlflow_tokens_cli

    console.print()
    mlflow_tokens_cli(["compare", "--tracking-uri", uri, "--experiment", EXPERIMENT])
    console.print(
        "\nThe same in the browser:\n"
        "  make serve            MLflow, and the Token cost page at http://127.0.0.1:5000/tokens/\n"
        "  make serve-visualdl   VisualDL, with the curves of every run",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nInterrupted. `make demo` goes on with the runs that have not finished.")
