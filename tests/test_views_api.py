"""The JSON API over a real store, and over readers that misbehave. Figures are worked out in stored_runs."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient

from mlflow_tokens.comparison.mlflow_reader import MlflowReader
from mlflow_tokens.comparison.reader import Curve, Experiment, Reader, ReadError, RunRow
from mlflow_tokens.views.columns import joined, json_number
from mlflow_tokens.views.mount import content_security_policy, mount
from tests.stored_runs import HOSTILE_NAME, copied_store, store_runs

API = "/tokens/api/v1/"


class ReaderOf:
    """A reader of the rows and curves it is given; `failure` is raised instead, where there is one."""

    def __init__(
        self, rows: Sequence[RunRow] = (), curves: Sequence[Curve] = (), failure: Exception | None = None
    ) -> None:
        self._rows, self._curves, self._failure = rows, curves, failure

    def experiments(self) -> list[Experiment]:
        return []

    def runs(self, experiments: Sequence[str] | None = None) -> list[RunRow]:
        if self._failure:
            raise self._failure
        return list(self._rows)

    def curves(self, run_ids: Sequence[str], metric: str, max_points: int = 1000) -> list[Curve]:
        return [curve for curve in self._curves if curve.metric == metric and curve.run_id in run_ids]


def client_of(factory: Callable[[], Reader]) -> FlaskClient:
    app = Flask(__name__)
    mount(app, "/tokens/", factory, "/#/experiments/{experiment_id}/runs/{run_id}")
    return app.test_client()


@pytest.fixture(scope="module")
def stored(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[FlaskClient, dict[str, str]]:
    uri = copied_store(empty_store, tmp_path_factory.mktemp("stored"))
    ids = store_runs(uri)
    return client_of(lambda: MlflowReader(uri)), ids


def ask(client: FlaskClient, question: str, status: int = 200, **parameters: Any) -> dict[str, Any]:
    response = client.get(API + question, query_string=parameters)
    assert response.status_code == status, response.text
    assert response.mimetype == "application/json"
    assert response.headers["Cache-Control"] == "no-store"
    answer: dict[str, Any] = response.get_json()
    return answer


@pytest.mark.parametrize(
    ("by", "names", "costs", "ranks"),
    [
        (
            "effective",
            ["packed", "grouped", "padded", HOSTILE_NAME],
            [2.5, 4.0, 5.0, None],
            [1, 2, 3, None],
        ),
        ("valid", ["packed", "grouped", "padded", HOSTILE_NAME], [2.5, 3.0, 5.0, None], [1, 2, 3, None]),
        (
            "trained",
            ["packed", "grouped", "padded", HOSTILE_NAME],
            [2.58064516129, 3.2, 5.33333333333, None],
            [1, 2, 3, None],
        ),
        ("computed", ["padded", "grouped", "packed", HOSTILE_NAME], [2.0, 2.4, 2.5, 9.0], [1, 2, 3, 4]),
    ],
)
def test_runs_ranked_by_each_denominator(
    stored: tuple[FlaskClient, dict[str, str]],
    by: str,
    names: list[str],
    costs: list[float | None],
    ranks: list[int | None],
) -> None:
    answer = ask(stored[0], "runs", by=by)
    columns = answer["columns"]
    assert (answer["by"], answer["rows"]) == (by, 6)
    assert {len(column) for column in columns.values()} == {6}
    assert columns["run_name"] == [*names, "cluster", "unpriced"]
    assert columns["cost_per_million"][:4] == costs
    assert columns["rank"] == [*ranks, 1, None]
    assert columns["currency"] == ["CNY"] * 4 + ["USD", None]


def test_counts_and_bills_are_exact_and_rates_have_six_digits(
    stored: tuple[FlaskClient, dict[str, str]],
) -> None:
    columns = ask(stored[0], "runs")["columns"]
    cluster = {name: column[columns["run_name"].index("cluster")] for name, column in columns.items()}
    assert cluster["tokens_effective"] == 10_251_184_259
    assert isinstance(cluster["tokens_effective"], int)
    assert cluster["cost_total"] == 1_234_567.89
    assert cluster["device_hours"] == 617_284.0  # 617,283.945 to six digits
    unpriced = {name: column[columns["run_name"].index("unpriced")] for name, column in columns.items()}
    assert unpriced["valid_ratio"] == 0.666667
    assert (unpriced["price"], unpriced["cost_total"], unpriced["rank"]) == (None, None, None)


def test_runs_of_some_experiments(stored: tuple[FlaskClient, dict[str, str]]) -> None:
    assert ask(stored[0], "runs", experiment="pretrain")["rows"] == 3
    assert ask(stored[0], "runs", experiment=["pretrain", "sft"])["rows"] == 6
    names = [experiment["name"] for experiment in ask(stored[0], "experiments")["experiments"]]
    assert names == ["Default", "pretrain", "sft"]


def test_curves_of_the_cost_per_million(stored: tuple[FlaskClient, dict[str, str]]) -> None:
    client, ids = stored
    asked = {"run_id": [ids["grouped"], ids["unpriced"], ids["grouped"]]}
    answer = ask(client, "curves", by="effective", **asked)
    # Cost 0.4 + 4.4/4 a step over 0.3 M tokens a step: 1.5/0.3, 2.6/0.6, 3.7/0.9, 4.8/1.2.
    expected = {
        "run_id": ids["grouped"],
        "x": [300_000, 600_000, 900_000, 1_200_000],
        "y": [5.0, 4.33333, 4.11111, 4.0],
    }
    assert answer["curves"] == [expected]
    assert answer == ask(client, "curves", **asked)
    logged = ask(client, "curves", metric="cost/per_million_tokens", against="tokens/effective", **asked)
    assert logged["curves"] == [expected]


def test_a_curve_follows_the_denominator(stored: tuple[FlaskClient, dict[str, str]]) -> None:
    client, ids = stored
    (curve,) = ask(client, "curves", by="computed", run_id=ids["grouped"])["curves"]
    assert (curve["x"][-1], curve["y"][-1]) == (2_000_000, 2.4)


@pytest.mark.parametrize(
    ("question", "parameters", "status", "says"),
    [
        ("runs", {"by": "lucky"}, 400, "by='lucky' is not one of effective, valid, trained, computed"),
        ("runs", {"experiment": "nope"}, 404, "no experiment named 'nope'"),
        ("curves", {}, 400, "give run_id 1 to 100 times"),
        ("curves", {"run_id": ["x"] * 101}, 400, "101 runs asked for"),
        ("curves", {"run_id": "0" * 32}, 404, "not found"),
        ("curves", {"run_id": "x", "by": "lucky"}, 400, "is not one of"),
        ("curves", {"run_id": "x", "metric": "loss"}, 400, "metric and against go together"),
        ("curves", {"run_id": "x", "metric": "loss", "by": "valid"}, 400, "either by, or metric"),
        ("curves", {"run_id": "../../etc/passwd"}, 404, "Invalid value"),
        ("statement", {}, 404, "ask for experiments, runs or curves"),
    ],
)
def test_bad_questions(
    stored: tuple[FlaskClient, dict[str, str]],
    question: str,
    parameters: dict[str, Any],
    status: int,
    says: str,
) -> None:
    answer = ask(stored[0], question, status, **parameters)
    assert list(answer) == ["error"]
    assert says in answer["error"]


def test_what_is_not_a_number_is_null() -> None:
    metrics = {
        "cost/total": math.inf,
        "tokens/effective": 1e6,
        "tokens/valid": math.nan,
        "device/hours": -math.inf,
    }
    row = RunRow("1", "odd", "1", "e", "RUNNING", metrics=metrics, tags={"mlflow_tokens.currency": "CNY"})
    curves = [
        Curve("1", "cost/total", (1, 2, 3), (1, 2, 3), (1.0, math.nan, 3.0)),
        Curve("1", "tokens/effective", (1, 2, 3), (1, 2, 3), (1e6, 2e6, math.inf)),
    ]
    client = client_of(lambda: ReaderOf([row], curves))
    columns = ask(client, "runs")["columns"]
    fields = ("rank", "cost_per_million", "cost_total", "tokens_valid", "device_hours", "tokens_effective")
    assert [columns[field] for field in fields] == [[None], [None], [None], [None], [None], [1_000_000]]
    assert ask(client, "curves", run_id="1")["curves"] == [
        {"run_id": "1", "x": [1_000_000, 2_000_000], "y": [1.0, None]}
    ]


def test_a_store_that_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    client = client_of(lambda: ReaderOf(failure=ReadError("postgresql://me@db could not be read")))
    assert ask(client, "runs", 502) == {
        "error": "the store of runs does not answer; the server's log says why"
    }
    assert "postgresql://me@db could not be read" in caplog.text


def test_a_defect_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    client = client_of(lambda: ReaderOf(failure=KeyError("secret")))
    assert ask(client, "runs", 500) == {"error": "the server failed to answer; its log says why"}
    assert "KeyError" in caplog.text


def test_compressed_where_the_client_takes_it(stored: tuple[FlaskClient, dict[str, str]]) -> None:
    plain = stored[0].get(API + "runs")
    packed = stored[0].get(API + "runs", headers={"Accept-Encoding": "gzip, br"})
    refused = stored[0].get(API + "runs", headers={"Accept-Encoding": "gzip;q=0"})
    assert "Content-Encoding" not in plain.headers
    assert "Content-Encoding" not in refused.headers
    assert packed.headers["Content-Encoding"] == "gzip"
    assert packed.headers["Vary"] == "Accept-Encoding"
    assert len(packed.data) < len(plain.data) / 2
    assert json.loads(gzip.decompress(packed.data)) == plain.get_json()


def test_the_policy_stands_on_our_routes_only() -> None:
    app = Flask(__name__)
    app.add_url_rule("/tokens-of-others", view_func=lambda: "host")
    mount(app, "/tokens/", ReaderOf, "/#/{experiment_id}/{run_id}")
    client = app.test_client()
    policy = client.get("/tokens/").headers["Content-Security-Policy"]
    scripts = next(part for part in policy.split("; ") if part.startswith("script-src"))
    assert scripts.startswith("script-src 'self' 'sha256-")
    assert "unsafe" not in scripts
    assert client.get(API + "runs").headers["Content-Security-Policy"] == policy
    assert "Content-Security-Policy" not in client.get("/tokens-of-others").headers
    assert "default-src 'none'" in content_security_policy([])


def test_joined_on_equal_steps_as_logged_last() -> None:
    loss = Curve("1", "loss", (1, 2, 3, 2), (1, 2, 3, 4), (4.0, 3.0, 2.0, 2.5))
    tokens = Curve("1", "tokens/effective", (2, 3, 4), (2, 3, 4), (20.0, 30.0, 40.0))
    assert joined(loss, tokens) == ([20.0, 30.0], [2.5, 2.0])


def test_json_numbers() -> None:
    assert json_number(1234567.89) == 1234570.0
    assert json_number(1234567.89, 12) == 1234567.89
    assert json_number(10_251_184_259) == 10_251_184_259
    assert json_number(math.nan) is None
    assert json_number("text") == "text"
