"""The command `mlflow-tokens`."""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

from rich.progress import Progress

from mlflow_tokens import __version__
from mlflow_tokens.comparison.reader import ReadError
from mlflow_tokens.comparison.table import DENOMINATORS, RankedRun, rank
from mlflow_tokens.journal import DEFAULT_DIRECTORY

#: A spreadsheet takes a text that begins so for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0 when it worked, 2 when it could not be done."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except ReadError as error:
        print(f"mlflow-tokens: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of the pipe (head, less) has gone; Python would complain once more at exit.
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlflow-tokens",
        description="What did each cent of a training run buy? Reads what mlflow_tokens has logged.",
    )
    parser.add_argument("--version", action="version", version=f"mlflow-tokens {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    compare = commands.add_parser(
        "compare",
        help="rank runs by cost per million tokens",
        description="Rank the runs of one or more experiments by cost per million tokens, cheapest first.",
    )
    compare.add_argument(
        "--tracking-uri", metavar="URI", help="MLflow store, such as http://host:5000 or sqlite:///mlflow.db "
        "(default: $MLFLOW_TRACKING_URI, else MLflow's own)"
    )  # fmt: skip
    compare.add_argument(
        "--experiment", nargs="+", metavar="NAME", help="experiments to compare (default: all)"
    )
    compare.add_argument(
        "--by",
        choices=DENOMINATORS,
        default="effective",
        help="what the cost is divided by (default: effective)",
    )
    form = compare.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of a table")
    form.add_argument("--csv", action="store_true", help="print CSV instead of a table")
    compare.set_defaults(run=_compare)
    sync = commands.add_parser(
        "sync",
        help="bring to MLflow what jobs left in their journals",
        description="Write every point that the journals in DIR hold and their runs lack, and end the runs "
        "of jobs that died. Doing it again changes nothing. Journals of running jobs are left alone.",
    )
    sync.add_argument(
        "directory", metavar="DIR", nargs="?",
        help=f"where the journals are (default: $MLFLOW_TOKENS_JOURNAL_DIR, else {DEFAULT_DIRECTORY})"
    )  # fmt: skip
    sync.add_argument(
        "--tracking-uri", metavar="URI", help="MLflow store to write to (default: the one the job wrote to)"
    )
    sync.set_defaults(run=_sync)
    page = commands.add_parser(
        "ui",
        help="show the page for a server that cannot have it itself",
        description="Serve the Token cost page over any MLflow store, with your own credentials: next to a "
        "server that is managed, older, or runs another app. Whoever reaches the address sees what you see.",
    )
    page.add_argument("--tracking-uri", metavar="URI", help="MLflow store (default: as for compare)")
    page.add_argument(
        "--host", default="127.0.0.1", help="address to answer at (default: this machine alone)"
    )
    page.add_argument("--port", type=int, default=5001, help="(default: 5001)")
    page.add_argument(
        "--mlflow-ui", metavar="URL", help="where the names of runs lead (default: the tracking server)"
    )
    page.add_argument(
        "--allowed-hosts", nargs="+", default=[], metavar="NAME", help="further names of this machine"
    )
    page.set_defaults(run=_ui)
    correct = commands.add_parser(
        "correct",
        help="say what a run cost by its invoice",
        description="Add what a run cost by its invoice. The page and `compare` show it from then on; what "
        "was logged, and earlier corrections, stay with the run.",
    )
    correct.add_argument("run_id", metavar="RUN", help="the id of the run")
    correct.add_argument("--total", required=True, metavar="MONEY", help='as in "4812.40 USD"')
    correct.add_argument("--by", required=True, metavar="WHO", help="who says so")
    correct.add_argument("--note", default="", metavar="WHY", help="such as the number of the invoice")
    correct.add_argument("--tracking-uri", metavar="URI", help="MLflow store (default: as for compare)")
    correct.set_defaults(run=_correct)
    prices = commands.add_parser(
        "prices",
        help="list the prices that a run can name",
        description="List the prices of the file that $MLFLOW_TOKENS_PRICES names and of the built-in price "
        "book, with source and date. A run names one with price=.",
    )
    prices.add_argument("filter", metavar="FILTER", nargs="?", default="", help='such as "h100" or "spot"')
    prices.add_argument("--json", action="store_true", help="print JSON instead of a table")
    prices.set_defaults(run=_prices)
    return parser


def _compare(options: argparse.Namespace) -> int:
    from mlflow_tokens.comparison.mlflow_reader import MlflowReader

    lines = rank(MlflowReader(options.tracking_uri).runs(options.experiment), options.by)
    if options.json:
        json.dump(
            {"by": options.by, "runs": [asdict(line) for line in lines]},
            sys.stdout,
            ensure_ascii=False,
            indent=2,
        )
        print()
    elif options.csv:
        _print_csv(lines)
    elif not lines:
        print(
            "No run here was logged by mlflow_tokens yet. Add mlflow_tokens.autolog() to a training script."
        )
    else:
        from rich.console import Console

        from mlflow_tokens.comparison.terminal import print_ranking

        print_ranking(lines, options.by, Console())
    return 0


def _ui(options: argparse.Namespace) -> int:
    from mlflow_tokens.standalone import PAGE, create_server, create_standalone

    hosts = frozenset({"localhost", "127.0.0.1", "::1", options.host, *options.allowed_hosts})
    app = create_standalone(options.tracking_uri, options.mlflow_ui, hosts)
    try:
        server = create_server(app, options.host, options.port)
    except (OSError, OverflowError) as error:
        print(f"mlflow-tokens: {options.host}:{options.port} cannot be used: {error}", file=sys.stderr)
        return 2
    print(f"Token cost  http://{options.host}:{options.port}{PAGE}   (Ctrl-C ends it)", flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


def _correct(options: argparse.Namespace) -> int:
    from mlflow_tokens.comparison.corrections import correct_run, correction

    try:
        made = correction(options.total, options.by, options.note)
    except ValueError as error:
        print(f"mlflow-tokens: {error}", file=sys.stderr)
        return 2
    for each in correct_run(options.tracking_uri, options.run_id, made):
        print(f"{each.time}  {each.total} {each.currency}  {each.by}  {each.note}".rstrip())
    return 0


def _prices(options: argparse.Namespace) -> int:
    from rich.console import Console

    from mlflow_tokens.pricing.terminal import show_prices

    try:
        show_prices(options.filter, options.json, os.environ, Console())
    except ValueError as error:
        print(f"mlflow-tokens: {error}", file=sys.stderr)
        return 2
    return 0


def _sync(options: argparse.Namespace) -> int:
    from mlflow_tokens.sync import CannotSync, NothingToSync, journals, sync_journal

    directory = Path(
        options.directory or os.environ.get("MLFLOW_TOKENS_JOURNAL_DIR") or DEFAULT_DIRECTORY
    ).absolute()
    failed = False
    try:
        paths = journals(directory)
    except CannotSync as error:
        print(f"mlflow-tokens: {error}", file=sys.stderr)
        return 2
    if not paths:
        print(f"There is no journal in {directory}.")
    with _progress() as progress:
        for path in paths:
            task = progress.add_task(path.name, total=None)
            try:
                synced = sync_journal(
                    path,
                    options.tracking_uri,
                    lambda done, total, task=task: progress.update(task, completed=done, total=total),  # type: ignore[misc]
                )
            except NothingToSync as nothing:
                line = f"{path.name}: nothing to do: {nothing}"
            except CannotSync as error:
                failed = True
                print(f"mlflow-tokens: {path}: {error}", file=sys.stderr)
                continue
            else:
                ended = f", ended as {synced.status}" if synced.status else ""
                line = f"{path.name}: run {synced.run}: {synced.points} points written{ended}"
            finally:
                progress.remove_task(task)
            print(line)
    return 2 if failed else 0


def _progress() -> Progress:
    """A bar a journal on stderr, where somebody looks at it."""
    from rich.console import Console

    return Progress(console=Console(stderr=True), transient=True)


def _print_csv(lines: Sequence[RankedRun]) -> None:
    names = [item.name for item in fields(RankedRun)]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    for line in lines:
        writer.writerow([_inert(getattr(line, name)) for name in names])


def _inert(value: object) -> object:
    """A text as a spreadsheet shows it rather than runs it."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


if __name__ == "__main__":
    sys.exit(main())
