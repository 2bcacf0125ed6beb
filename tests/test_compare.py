"""Ranking: the command, the DataFrame and the terminal table, over hand-made runs.

Costs per million tokens are worked out in tests/stored_runs.py.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
from rich.console import Console

import mlflow_tokens
from mlflow_tokens.cli import main
from mlflow_tokens.comparison.reader import ReadError, RunRow
from mlflow_tokens.comparison.table import rank
from mlflow_tokens.comparison.terminal import print_ranking
from tests.stored_runs import HOSTILE_NAME, RUNS, StoredRun, store_runs


def row(
    name: str, cost: float | None, tokens: float | None, currency: str = "CNY", definition: str = "d"
) -> RunRow:
    metrics = {"cost/total": cost, "tokens/effective": tokens}
    return RunRow(
        run_id=name,
        run_name=name,
        experiment_id="1",
        experiment_name="e",
        status="FINISHED",
        metrics={key: value for key, value in metrics.items() if value is not None},
        tags={"mlflow_tokens.currency": currency, "mlflow_tokens.token_definition": definition},
    )


def test_the_cheapest_comes_first_and_the_unknown_last() -> None:
    rows = [
        row("a", 3.0, 1e6),
        row("b", None, 1e6),
        row("c", 1.0, 1e6),
        row("d", 1.0, None),
        row("e", 2.0, 2e6),
    ]
    assert [(line.run_name, line.rank, line.cost_per_million) for line in rank(rows)] == [
        ("c", 1, 1.0),
        ("e", 2, 1.0),
        ("a", 3, 3.0),
        ("b", None, None),
        ("d", None, None),
    ]


def test_another_currency_or_token_definition_is_ranked_apart() -> None:
    rows = [row("a", 3.0, 1e6), row("b", 0.1, 1e6, currency="USD"), row("c", 0.1, 1e6, definition="other")]
    rows.append(row("d", 2.0, 1e6))
    ranked = [(line.run_name, line.rank, line.group) for line in rank(rows)]
    assert ranked == [("d", 1, "CNY; d"), ("a", 2, "CNY; d"), ("c", 1, "CNY; other"), ("b", 1, "USD; d")]


def test_another_schema_is_ranked_apart() -> None:
    later = row("b", 1.0, 1e6)
    later = replace(later, tags={**later.tags, "mlflow_tokens.schema": "2"})
    assert [line.group for line in rank([row("a", 3.0, 1e6), later])] == ["CNY; d", "CNY; d (schema 2)"]


def test_not_a_number_is_unknown() -> None:
    (line,) = rank([row("a", float("nan"), 1e6)])
    assert (line.rank, line.cost_total, line.tokens_effective) == (None, None, 1_000_000)


@pytest.mark.parametrize(
    ("by", "order"),
    [
        ("effective", {"packed": 2.5, "grouped": 4.0, "padded": 5.0}),
        ("valid", {"packed": 2.5, "grouped": 3.0, "padded": 5.0}),
        ("computed", {"padded": 2.0, "grouped": 2.4, "packed": 2.5}),
    ],
)
def test_the_command_ranks_an_experiment(
    store: str, capsys: pytest.CaptureFixture[str], by: str, order: dict[str, float]
) -> None:
    store_runs(store)
    command = ["compare", "--tracking-uri", store, "--experiment", "pretrain", "--by", by]
    assert main([*command, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["by"] == by
    assert [(run["run_name"], run["cost_per_million"]) for run in answer["runs"]] == list(order.items())
    assert main([*command, "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(line["run_name"], float(line["cost_per_million"])) for line in rows] == list(order.items())
    frame = mlflow_tokens.compare("pretrain", tracking_uri=store, by=by)
    assert list(zip(frame["run_name"], frame["cost_per_million"], strict=True)) == list(order.items())


def test_the_frame_keeps_exact_integers_and_marks_the_unknown(store: str) -> None:
    store_runs(store)
    frame = mlflow_tokens.compare(tracking_uri=store).set_index("run_name")
    assert len(frame) == len(RUNS)
    assert frame.loc["cluster", "tokens_computed"] == 10_251_184_259
    assert frame.loc["unpriced", "rank"] is pandas.NA
    assert pandas.isna(frame.loc["unpriced", "cost_total"])
    assert frame.loc["padded", "valid_ratio"] == 0.4  # 1.6 of 4 million


def test_an_empty_store_gives_an_empty_frame_with_all_columns(store: str) -> None:
    frame = mlflow_tokens.compare(tracking_uri=store)
    assert len(frame) == 0 and "cost_per_million" in frame.columns


@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_the_terminal_table_cuts_no_figure_at_any_width(store: str, width: int) -> None:
    store_runs(store)
    from mlflow_tokens.comparison.mlflow_reader import MlflowReader

    out = io.StringIO()
    lines = rank(MlflowReader(store).runs(["pretrain"]))
    print_ranking(lines, "effective", Console(file=out, width=width))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for figure in ("packed", "grouped", "padded", "2.5", "4", "5", "1,600,000", "40.0%", "72,000"):
        assert figure in text
    assert "…" not in text
    assert text.index("packed") < text.index("grouped") < text.index("padded")


def test_a_hostile_name_is_text_in_the_table_and_in_a_spreadsheet(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store_runs(
        store, (StoredRun("[bold]=1+1[/bold]", cost=1.0, effective=1e6), StoredRun("=cmd|' /C calc'!A0"))
    )
    assert main(["compare", "--tracking-uri", store]) == 0
    assert "[bold]" in capsys.readouterr().out
    assert main(["compare", "--tracking-uri", store, "--csv"]) == 0
    names = [line["run_name"] for line in csv.DictReader(io.StringIO(capsys.readouterr().out))]
    assert names == ["[bold]=1+1[/bold]", "'=cmd|' /C calc'!A0"]
    assert HOSTILE_NAME not in names


def test_several_experiments(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    store_runs(store)
    assert main(["compare", "--tracking-uri", store, "--experiment", "pretrain", "sft", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == len(RUNS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--experiment", "nowhere"], "nowhere"),
        (["--tracking-uri", "http://127.0.0.1:9"], "no server answers"),
        (["--tracking-uri", "sqlite:////nowhere/mistyped.db"], "no database at /nowhere/mistyped.db"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_status_2(
    store: str, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["compare", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mlflow-tokens: ") and says in captured.err
    assert "Traceback" not in captured.err


def test_an_empty_store_says_what_to_do(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare"]) == 0
    assert "mlflow_tokens.autolog()" in capsys.readouterr().out


def test_the_function_has_the_same_errors(store: str) -> None:
    with pytest.raises(ReadError, match="nowhere"):
        mlflow_tokens.compare("nowhere")
    with pytest.raises(ValueError, match="by='tokens' is not one of effective, valid, trained, computed"):
        mlflow_tokens.compare(by="tokens")


def test_the_installed_command(store: str) -> None:
    command = Path(sys.executable).with_name("mlflow-tokens")
    done = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    assert "compare" in done.stdout and "rank runs by cost per million tokens" in done.stdout
    bad = subprocess.run([command, "compare", "--by", "words"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2 and "effective" in bad.stderr
