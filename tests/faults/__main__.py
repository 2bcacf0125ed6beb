"""`python -m tests.faults`: the long run, or one scenario again."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.faults.bench import bench
from tests.faults.report import write_report
from tests.faults.runner import Result, run_case, run_cases


def main() -> int:
    """0 if every case passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--count", type=int, help="go on until so many faults were injected")
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[1], help="of the first case, or of the only ones"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case after so many")
    parser.add_argument("--report", type=Path, help="write a report in Markdown")
    parser.add_argument("--folder", type=Path, help="where cases are kept that fail (default: a new one)")
    options = parser.parse_args()
    # What a case prints is read while the others still run.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    folder = options.folder or Path(tempfile.mkdtemp(prefix="faults-"))
    console = Console()
    began = time.monotonic()
    if options.count is None:
        results = _again(options.seed, folder, console)
    else:
        results = _long_run(options.seed[0], options.count, 60 * options.minutes, folder, console)
    if options.report is not None:
        write_report(options.report, results, time.monotonic() - began)
        console.print(f"The report is in {options.report}")
    failed = [result for result in results if not result.passed]
    console.print(
        f"{sum(result.injected.total() for result in results)} faults in {len(results)} cases, "
        f"{len(failed)} failed: {' '.join(str(result.scenario.seed) for result in failed)}",
        highlight=False,
    )
    if not failed and options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return bool(failed)


def _again(seeds: list[int], folder: Path, console: Console) -> list[Result]:
    results = []
    with bench(folder) as running:
        for seed in seeds:
            results.append(run_case(seed, running))
            console.print(str(results[-1]), highlight=False, markup=False, soft_wrap=True)
            console.print(f"  injected {dict(results[-1].injected)} in {results[-1].seconds:.1f} s")
    return results


def _long_run(first_seed: int, faults: int, seconds: float, folder: Path, console: Console) -> list[Result]:
    results: list[Result] = []
    columns = (
        TextColumn("faults"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with bench(folder) as running, Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=faults)
        for result in run_cases(first_seed, faults, running, seconds):
            results.append(result)
            failed = sum(not result.passed for result in results)
            progress.update(
                task, advance=result.injected.total(), description=f"{len(results)} cases, {failed} failed"
            )
            if not result.passed:
                console.print(str(result), highlight=False, markup=False, soft_wrap=True)
    return results


if __name__ == "__main__":
    sys.exit(main())
