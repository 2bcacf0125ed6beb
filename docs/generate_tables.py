"""Write the metric tables into both READMEs and docs/metrics.md: `python docs/generate_tables.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlflow_tokens.metrics import METRICS, MetricSpec

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- metrics -->\n", "<!-- /metrics -->\n"


def tables() -> dict[Path, str]:
    """The table of each file."""
    logged = [spec for spec in METRICS if spec.logged != "reserved"]
    return {
        ROOT / "README.md": table(("metric", "unit", "definition"), [english(spec) for spec in logged]),
        ROOT / "README.zh-CN.md": table(("指标", "单位", "定义"), [chinese(spec) for spec in logged]),
        ROOT / "docs" / "metrics.md": table(
            ("metric", "unit", "definition", "定义", "logged"),
            [(*english(spec), spec.definition_zh, spec.logged) for spec in METRICS],
        ),
    }


def english(spec: MetricSpec) -> tuple[str, ...]:
    return f"`{spec.name}`", spec.unit, spec.definition


def chinese(spec: MetricSpec) -> tuple[str, ...]:
    return f"`{spec.name}`", spec.unit, spec.definition_zh


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_table(text: str, content: str) -> str:
    """The text with what stands between the marks replaced."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + content + END + rest.partition(END)[2]


if __name__ == "__main__":
    for path, content in tables().items():
        path.write_text(with_table(path.read_text("utf-8"), content), "utf-8")
