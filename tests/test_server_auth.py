"""The page under MLflow's own permissions: who may read one of two experiments sees that one, and no trace
of the other, on every route and in the browser."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow.server.auth.client import AuthServiceClient

from tests.servers import mlflow_server
from tests.stored_runs import RUNS, store_runs

playwright_api = pytest.importorskip("playwright.sync_api", reason="pip install 'mlflow-tokens[test]'")
pytestmark = pytest.mark.browser

#: A page may take this long on a busy machine, in ms.
PATIENCE_MS = 30_000
PASSWORD = "correct-horse-battery"
AUTH = """
[mlflow]
default_permission = NO_PERMISSIONS
database_uri = sqlite:///{folder}/auth.db
auth_cache_ttl_seconds = 3600
"""
#: RUNS by experiment: three in "pretrain", three in "sft" or elsewhere.
READABLE, HIDDEN = "pretrain", "sft"
SECRETS = [run.name for run in RUNS if run.experiment != READABLE]


def _get(url: str, user: str | None, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(url, method=method)
    if user:
        token = base64.b64encode(f"{user}:{PASSWORD}".encode()).decode()
        request.add_header("Authorization", f"Basic {token}")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode("utf-8", "replace")


@dataclass
class Server:
    address: str
    ids: dict[str, str]

    def get(self, path: str, user: str | None, method: str = "GET") -> tuple[int, str]:
        return _get(f"{self.address}/tokens/{path}", user, method)

    def runs(self, user: str, query: str = "") -> set[str]:
        status, text = self.get(f"api/v1/runs?by=effective{query}", user)
        assert status == 200, text
        return set(json.loads(text)["columns"]["run_name"])


@pytest.fixture(scope="module", params=["", "/ml"], ids=["root", "prefix"])
def server(
    request: pytest.FixtureRequest, empty_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("auth")
    database = folder / "mlflow.db"
    database.write_bytes(empty_store.read_bytes())
    uri = f"sqlite:///{database}"
    ids = store_runs(uri)
    (folder / "auth.ini").write_text(AUTH.format(folder=folder))
    environ = {
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"),
        "MLFLOW_AUTH_ADMIN_USERNAME": "admin",
        "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORD,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": uuid.uuid4().hex,
    }
    with (
        pytest.MonkeyPatch.context() as patch,
        mlflow_server(uri, folder, app="tokens-basic-auth", prefix=request.param, environ=environ) as address,
    ):
        patch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
        patch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
        users = AuthServiceClient(address)
        for name in ("reader", "nobody"):
            users.create_user(name, PASSWORD)
        from mlflow import MlflowClient

        readable = MlflowClient(uri).get_experiment_by_name(READABLE)
        users.grant_user_permission("reader", "experiment", readable.experiment_id, "READ")
        yield Server(address, ids)


def test_nobody_who_has_not_logged_in_gets_anything(server: Server) -> None:
    for path in ("", "api/v1/runs", "api/v1/experiments", "_dash-layout", "assets/page.js", "nothing"):
        assert server.get(path, None)[0] == 401, path
    assert server.get("_dash-update-component", None, "POST")[0] == 401


def test_everybody_sees_what_they_may_read(server: Server) -> None:
    assert server.runs("admin") == {run.name for run in RUNS}
    assert server.runs("reader") == {"packed", "grouped", "padded"}
    assert server.runs("nobody") == set()
    for user, names in (("reader", [READABLE]), ("nobody", [])):
        experiments = json.loads(server.get("api/v1/experiments", user)[1])["experiments"]
        assert [experiment["name"] for experiment in experiments] == names


def test_a_guess_tells_nothing(server: Server) -> None:
    hidden, none = server.ids[SECRETS[0]], "0" * 32
    for user in ("reader", "nobody"):
        by_name = server.get(f"api/v1/runs?experiment={HIDDEN}", user)
        assert by_name[0] == 404
        assert by_name[1].replace(HIDDEN, "X") == server.get("api/v1/runs?experiment=X", user)[1]
        for query in ("by=effective", "metric=cost/total&against=tokens/effective"):
            guessed = server.get(f"api/v1/curves?run_id={hidden}&{query}", user)
            absent = server.get(f"api/v1/curves?run_id={none}&{query}", user)
            assert guessed[0] == absent[0] == 404
            assert guessed[1].replace(hidden, "ID") == absent[1].replace(none, "ID")
    mixed = f"api/v1/curves?run_id={server.ids['packed']}&run_id={hidden}&by=effective"
    assert server.get(mixed, "reader")[0] == 404
    assert server.get(f"api/v1/curves?run_id={server.ids['packed']}&by=effective", "reader")[0] == 200
    assert server.get(mixed, "admin")[0] == 200


def test_no_route_of_the_page_says_the_name_of_a_hidden_run(server: Server) -> None:
    paths = ["", "_dash-layout", "_dash-dependencies", "assets/page.js", "api/v1/runs", "api/v1/experiments"]
    for path in paths:
        for user in ("reader", "nobody"):
            status, text = server.get(path, user)
            assert status == 200, path
            assert not any(name in text for name in [HIDDEN, *SECRETS]), path


def test_what_is_next_to_the_page_is_still_mlflows_to_decide(server: Server) -> None:
    for path in ("tokens-other", "tokensx/", "api/3.0/mlflow/nothing"):
        status, _ = _get(f"{server.address}/{path}", "nobody")
        assert status in (403, 404), path
    # Dots lead nowhere: all below the page is the page.
    status, text = server.get("../api/2.0/mlflow/experiments/get-by-name?experiment_name=sft", "nobody")
    assert (status, HIDDEN in text) == (200, False)
    assert "mlflow_tokens" in text or "dash" in text


@pytest.mark.parametrize(("user", "rows"), [("reader", 3), ("nobody", 0)])
def test_a_user_who_is_no_admin_has_a_working_page(
    server: Server, browser: playwright_api.Browser, user: str, rows: int
) -> None:
    context = browser.new_context(http_credentials={"username": user, "password": PASSWORD})
    page = context.new_page()
    refused: list[str] = []
    page.on("response", lambda answer: refused.append(answer.url) if answer.status >= 400 else None)
    page.on("console", lambda said: refused.append(said.text) if said.type == "error" else None)
    page.goto(f"{server.address}/tokens/")
    if rows:
        shown = page.locator(".ag-center-cols-container .ag-row")
        playwright_api.expect(shown).to_have_count(rows, timeout=PATIENCE_MS)
    else:
        playwright_api.expect(page.locator(".mt-empty")).to_be_visible(timeout=PATIENCE_MS)
    text = page.content()
    context.close()
    assert not any(name in text for name in [HIDDEN, *SECRETS])
    # The first request comes without credentials, and is asked for them.
    assert [each for each in refused if not each.endswith("/tokens/")] == []
