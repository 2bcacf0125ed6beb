"""The page in a real Chromium, served by a real `mlflow server --app-name tokens`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mlflow_tokens.cli import main
from tests.conftest import Stored
from tests.servers import mlflow_server
from tests.stored_runs import HOSTILE_NAME, RUNS, copied_store, store_runs

pytestmark = pytest.mark.browser
playwright_api = pytest.importorskip("playwright.sync_api", reason="pip install 'mlflow-tokens[test]'")
expect = playwright_api.expect

#: A page may take this long on a busy machine, in ms.
PATIENCE_MS = 30_000
LINES = ".js-plotly-plot .scatterlayer .trace"


@dataclass
class Seen:
    """What a browser context met that it should not have."""

    console: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def empty(
    browser: playwright_api.Browser, empty_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """The address of a server, and the URI of its store, which is empty until a test asks for `served`."""
    folder = tmp_path_factory.mktemp("server")
    uri = copied_store(empty_store, folder)
    with mlflow_server(uri, folder) as address:
        yield address, uri


@pytest.fixture(scope="module")
def served(empty: tuple[str, str]) -> tuple[str, dict[str, str]]:
    """The address of the server, and the ids of its runs by name."""
    address, uri = empty
    return address, store_runs(uri)


@contextmanager
def opened(
    browser: playwright_api.Browser, address: str, may_say: str = r"(?!)"
) -> Iterator[playwright_api.Page]:
    """A page in a fresh profile. At its end no request went elsewhere, and our page's console has no error.

    `may_say` is a pattern of the errors that the test provokes.
    """

    def hear(kind: str, text: str, url: str) -> None:
        if kind == "error" and "/tokens/" in url and not re.search(may_say, text):
            seen.console.append(text)

    context = browser.new_context(
        viewport={"width": 1280, "height": 900}, locale="en-US", color_scheme="light"
    )
    context.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    seen = Seen()
    page = context.new_page()
    page.on("console", lambda message: hear(message.type, message.text, page.url))
    page.on("pageerror", lambda error: hear("error", str(error), page.url))
    local = re.compile(rf"{re.escape(address)}/|data:|blob:")
    context.on(
        "request", lambda request: None if local.match(request.url) else seen.outside.append(request.url)
    )
    page.goto(f"{address}/tokens/")
    yield page
    context.close()
    assert seen.outside == []
    assert seen.console == []


def column(page: playwright_api.Page, name: str) -> playwright_api.Locator:
    """The cells of a column from top to bottom; the grid's DOM keeps another order."""
    return page.locator(f".ag-center-cols-container .ag-row .ag-cell[col-id='{name}']")


def cells(page: playwright_api.Page, name: str) -> list[str]:
    rows = column(page, name).evaluate_all(
        "found => found.map(cell => [Number(cell.closest('.ag-row').ariaRowIndex), cell.innerText])"
    )
    return [text for _, text in sorted(rows)]


def expect_cells(page: playwright_api.Page, name: str, texts: list[str]) -> None:
    """Wait until the column reads so."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while (found := cells(page, name)) != texts and time.monotonic() < deadline:
        page.wait_for_timeout(50)
    assert found == texts


def header(page: playwright_api.Page, name: str) -> playwright_api.Locator:
    return page.locator(f".ag-header-cell[col-id='{name}'] .ag-header-cell-label")


def test_an_empty_store_says_how_to_fill_it(browser: playwright_api.Browser, empty: tuple[str, str]) -> None:
    with opened(browser, empty[0]) as page:
        expect(page.locator(".mt-empty")).to_contain_text("No run has logged its tokens yet")
        expect(page.locator(".mt-empty code")).to_contain_text("mlflow_tokens.autolog(")
        expect(page.locator("#runs")).to_be_hidden()
        expect(page.locator("#plot-panel")).to_be_hidden()


def test_the_table_the_plot_and_the_way_back(
    browser: playwright_api.Browser, served: tuple[str, dict[str, str]]
) -> None:
    address, ids = served
    with opened(browser, address) as page:
        expect_cells(page, "run_name", ["packed", "grouped", "padded", HOSTILE_NAME, "cluster", "unpriced"])
        expect_cells(page, "rank", ["1", "2", "3", "–", "1", "–"])
        assert cells(page, "cost_per_million") == [
            "¥2.50",
            "¥4.00",
            "¥5.00",
            "unknown",
            "120.43 USD",
            "no price",
        ]
        assert cells(page, "cost_total") == ["¥4.00", "¥4.80", "¥8.00", "¥9.00", "1.23M USD", "no price"]
        assert cells(page, "tokens") == ["1.6M", "1.2M", "1.6M", "–", "10.3B", "2M"]
        assert cells(page, "valid_ratio") == ["100.0%", "80.0%", "40.0%", "–", "100.0%", "66.7%"]
        assert cells(page, "tokens_per_second") == ["72K", "9K", "160K", "–", "7.2B", "50K"]
        assert cells(page, "tokens_per_second_per_device") == ["9K", "1.13K", "20K", "–", "7.03M", "6.25K"]
        assert cells(page, "device_hours") == ["2", "2.4", "4", "–", "617,284", "–"]
        assert cells(page, "devices")[4] == "1024 x H800"
        assert cells(page, "price")[3:] == ["2.0 CNY/device-hour", "98.32 USD/instance-hour x8", "no price"]
        assert cells(page, "status") == ["finished", "finished", "finished", "killed", "finished", "failed"]
        expect(page.locator(".mt-divider")).to_have_text(
            [
                "Ranked on its own: billed in CNY",
                "Ranked on its own: billed in USD",
                re.compile("^No price, so no rank"),
            ]
        )
        expect(page.locator("#summary")).to_have_text("6 runs, 4 ranked")

        expect(page.locator(LINES)).to_have_count(3)
        expect(page.locator(".legendtext")).to_have_text(["packed", "grouped", "padded"])

        column(page, "tokens").filter(has_text="10.3B").hover()
        expect(page.locator(".ag-tooltip")).to_have_text("exactly 10,251,184,259")

        assert page.evaluate("window.hacked") is None
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")

        link = column(page, "run_name").get_by_role("link", name="grouped")
        link.click()
        page.wait_for_url(re.compile(rf"{address}/#/experiments/\d+/runs/{ids['grouped']}"))
        expect(page.get_by_text("grouped", exact=True).first).to_be_visible()

        # MLflow's own pages are as they were.
        page.goto(f"{address}/#/experiments")
        expect(page.get_by_role("link", name="pretrain")).to_be_visible()
        assert "content-security-policy" not in page.request.get(f"{address}/").headers


def test_the_denominator_and_sorting(
    browser: playwright_api.Browser, served: tuple[str, dict[str, str]]
) -> None:
    with opened(browser, served[0]) as page:
        expect_cells(page, "rank", ["1", "2", "3", "–", "1", "–"])
        page.get_by_text("computed tokens", exact=True).click()
        expect_cells(page, "run_name", ["padded", "grouped", "packed", HOSTILE_NAME, "cluster", "unpriced"])
        expect_cells(page, "cost_per_million", ["¥2.00", "¥2.40", "¥2.50", "¥9.00", "120.43 USD", "no price"])
        expect_cells(page, "tokens", ["4M", "2M", "1.6M", "1M", "10.3B", "3M"])
        expect(page.locator(LINES)).to_have_count(4)
        expect(page.locator(".ytitle")).to_have_text("CNY per million computed tokens")

        page.get_by_text("valid tokens", exact=True).click()
        expect_cells(
            page, "cost_per_million", ["¥2.50", "¥3.00", "¥5.00", "unknown", "120.43 USD", "no price"]
        )

        # As text 160K < 72K < 9K; as numbers 9,000 < 72,000 < 160,000. The unknown stays last.
        header(page, "tokens_per_second").click()
        expect_cells(page, "tokens_per_second", ["9K", "72K", "160K", "–", "7.2B", "50K"])
        header(page, "tokens_per_second").click()
        expect_cells(page, "tokens_per_second", ["160K", "72K", "9K", "–", "7.2B", "50K"])
        expect(page.locator(".mt-divider")).to_have_count(3)

        line = page.locator(f"{LINES} path.js-line").first
        expect(line).to_have_css("stroke", "rgb(11, 107, 203)")
        page.emulate_media(color_scheme="dark")
        expect(line).to_have_css("stroke", "rgb(111, 182, 255)")
        expect(page.locator("body")).to_have_css("background-color", "rgb(17, 23, 29)")


def test_chinese_is_remembered(browser: playwright_api.Browser, served: tuple[str, dict[str, str]]) -> None:
    with opened(browser, served[0]) as page:
        expect(page.locator("h1")).to_have_text("Token cost")
        page.get_by_role("button", name="中文").click()
        for _ in range(2):
            expect(page.locator("h1")).to_have_text("词元成本")
            expect_cells(page, "tokens", ["160万", "120万", "160万", "–", "103亿", "200万"])
            expect_cells(page, "tokens_per_second", ["7.2万", "9,000", "16万", "–", "72亿", "5万"])
            expect_cells(page, "status", ["已完成", "已完成", "已完成", "已终止", "已完成", "失败"])
            expect(header(page, "price")).to_have_text("单价")
            expect(page.locator(".mt-divider").last).to_have_text(re.compile("没有单价，不参与排名"))
            expect(page.locator(".ytitle")).to_have_text("CNY / 每百万留存词元")
            assert page.evaluate("document.documentElement.lang") == "zh-CN"
            page.reload()


def test_selected_runs_and_experiments(
    browser: playwright_api.Browser, served: tuple[str, dict[str, str]]
) -> None:
    with opened(browser, served[0]) as page:
        expect(page.locator(LINES)).to_have_count(3)
        boxes = page.locator(".ag-pinned-left-cols-container .ag-row input[type='checkbox']")
        boxes.nth(0).check()
        expect(page.locator(LINES)).to_have_count(1)
        boxes.nth(2).check()
        expect(page.locator(LINES)).to_have_count(2)
        boxes.nth(4).check()
        expect(page.locator("#plot-note")).to_contain_text("different currencies: CNY, USD")

        page.locator("#experiment").click()
        page.get_by_role("option", name="sft").click()
        page.keyboard.press("Escape")
        expect_cells(page, "run_name", [HOSTILE_NAME, "cluster", "unpriced"])


def test_the_page_says_that_the_server_is_gone(
    browser: playwright_api.Browser, served: tuple[str, dict[str, str]]
) -> None:
    with opened(browser, served[0], may_say="502") as page:
        expect_cells(page, "rank", ["1", "2", "3", "–", "1", "–"])
        page.route(
            "**/api/v1/**", lambda route: route.fulfill(status=502, json={"error": "the store is away"})
        )
        page.get_by_text("valid tokens", exact=True).click()
        expect(page.locator(".mt-error")).to_contain_text("the store is away")
        page.unroute("**/api/v1/**")
        page.get_by_role("button", name="Refresh").click()
        expect(page.locator(".mt-error")).to_have_count(0)
        expect_cells(page, "rank", ["1", "2", "3", "–", "1", "–"])


def test_the_divider_names_what_sets_runs_apart(
    browser: playwright_api.Browser, served: tuple[str, dict[str, str]]
) -> None:
    columns = {
        "run_id": ["a", "b"],
        "run_name": ["first", "second"],
        "rank": [1, 1],
        "currency": ["CNY", "CNY"],
        "token_definition": ["labels != <b>-100</b>", None],
        "group": ["1", "2"],
        "cost_per_million": [1.0, 0.0190],
    }
    with opened(browser, served[0], may_say="404") as page:
        answer = {"by": "valid", "rows": 2, "columns": columns}
        page.route("**/api/v1/runs?**", lambda route: route.fulfill(json=answer))
        page.get_by_text("valid tokens", exact=True).click()
        expect_cells(page, "cost_per_million", ["¥1.00", "¥0.0190"])
        expect(page.locator(".mt-divider")).to_have_text(
            [
                "Ranked on its own: tokens counted as “labels != <b>-100</b>”",
                "Ranked on its own: no token definition recorded",
            ]
        )
        expect(page.locator("#plot-note")).to_contain_text("not found")  # no such run has a curve


def test_a_corrected_cost_tells_who_corrected_it_and_what_was_logged(
    browser: playwright_api.Browser, stored: Stored, tmp_path: Path
) -> None:
    run = stored.client.create_run("0", tags=RUNS[2].tags()).info.run_id
    for name, value in RUNS[2].metrics(4).items():
        stored.client.log_metric(run, name, value)
    assert main(["correct", run, "--total", "8 CNY", "--by", "finance", "--note", "<b>INV-7</b>"]) == 0
    with mlflow_server(stored.uri, tmp_path) as address, opened(browser, address) as page:
        # 8.00 CNY for 1.6 M tokens, where 4.00 were logged.
        expect_cells(page, "cost_total", ["¥8.00 *"])
        assert cells(page, "cost_per_million") == ["¥5.00 *"]
        page.locator(".ag-cell[col-id='cost_total']").hover()
        tooltip = page.locator(".ag-tooltip")
        expect(tooltip).to_contain_text("by invoice, finance")
        expect(tooltip).to_contain_text("<b>INV-7</b> (logged: ¥4)")
