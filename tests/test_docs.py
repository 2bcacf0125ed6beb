"""What the documents say about the code is what the code does."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("generate_tables", ROOT / "docs" / "generate_tables.py")
assert _spec is not None and _spec.loader is not None
generate_tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate_tables)


@pytest.mark.parametrize("path", generate_tables.tables(), ids=lambda path: path.name)
def test_the_metric_tables_are_those_of_the_code(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text == generate_tables.with_table(text, generate_tables.tables()[path]), (
        "run docs/generate_tables.py"
    )


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_readme_lists_every_option(name: str) -> None:
    from mlflow_tokens import autolog

    text = (ROOT / name).read_text("utf-8")
    for option in inspect.signature(autolog).parameters:
        assert f"`{option}`" in text


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]), ids=lambda path: path.name
)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text("utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target
