"""The token report of a run: how long its rows were, what it was fed, and how much of that was padding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape

from mlflow_tokens.account import Account
from mlflow_tokens.profile import Profile

SCHEMA = 1

#: English and Chinese, side by side: the file is opened from MLflow's artifacts by whoever finds it.
_TITLE = "Tokens of this run · 本次运行的词元"
_STYLE = """
body { font: 15px/1.5 system-ui, "Noto Sans CJK SC", sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1f2328; background: #fff }
h2 { font-size: 1.1rem; margin-top: 2rem } small { color: #59636e }
table { border-collapse: collapse } td, th { padding: .2rem .6rem; text-align: right; font-variant-numeric: tabular-nums; font-weight: 400 }
th:first-child, td:first-child { text-align: left } thead th { color: #59636e }
.bar { background: #4c8dff; height: .8rem } .cell { min-width: 2.2rem; text-align: center; color: #1f2328 }
"""  # noqa: E501


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Valid / computed tokens, a row for each source or row length and a column for each stage.

    by: "source" or "length". until: the last optimizer step of each stage. rows: None where a stage has none.
    """

    by: str
    until: tuple[int, ...]
    rows: Mapping[str, tuple[float | None, ...]]


@dataclass(frozen=True, slots=True)
class TokenReport:
    """What the tokens of a run were like. None and empty: unknown, or there was none.

    histogram: the smallest length of each bucket, and rows in it, of a sample of the rows since the last
    (re)start scaled up to all of them. full_row_ratio: share of the rows that fill the widest batch.
    rank_skew: valid tokens of the data rank that has most of them (fullest_rank) over the mean of all.
    """

    computed: int | None
    valid: int | None
    trained: int | None
    effective: int | None
    skipped: int | None
    routed: int | None
    mean_length: float | None
    p95_length: float | None
    widest: int | None
    full_row_ratio: float | None
    rank_skew: float | None
    fullest_rank: int | None
    histogram: tuple[tuple[int, int], ...]
    sources: Mapping[str, Mapping[str, int]]
    heat_map: HeatMap | None

    @property
    def padding_ratio(self) -> float | None:
        """Share of the computed tokens that was padding."""
        return 1 - self.valid / self.computed if self.computed and self.valid is not None else None

    def to_json(self) -> str:
        """The report for programs."""
        values = {"schema": SCHEMA, **asdict(self), "padding_ratio": self.padding_ratio}
        return json.dumps(values, ensure_ascii=False, indent=1)

    def to_html(self) -> str:
        """The report for people: one file that asks nobody for anything."""
        parts = [_totals(self), _histogram(self), _sources(self), _heat_map(self.heat_map)]
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{_TITLE}</title>'
            f"<style>{_STYLE}</style><h1>{_TITLE}</h1>{''.join(parts)}</html>"
        )


def report_of(account: Account, profile: Profile) -> TokenReport:
    """The report of a run at its end."""
    lengths = account.lengths if account.valid is not None else None
    known = lengths is not None and bool(lengths.buckets)
    return TokenReport(
        computed=account.computed,
        valid=account.valid,
        trained=account.trained,
        effective=account.effective,
        skipped=account.skipped,
        routed=account.routed or None,
        mean_length=lengths.mean if lengths and known else None,
        p95_length=lengths.percentile(0.95) if lengths and known else None,
        widest=lengths.width if lengths and known else None,
        full_row_ratio=lengths.full_ratio if lengths and known else None,
        rank_skew=account.rank_skew,
        fullest_rank=account.fullest_rank,
        histogram=tuple((length, rows) for length, (rows, _, _) in sorted(lengths.buckets.items()))
        if lengths and known
        else (),
        sources=account.by_source or {},
        heat_map=_stages(profile),
    )


def _stages(profile: Profile) -> HeatMap | None:
    stages = profile.stages()
    by = "source" if any(stage.by_source for stage in stages) else "length"
    cells: dict[str, dict[int, tuple[int, int]]] = {}
    for column, stage in enumerate(stages):
        if by == "source":
            tokens = dict(stage.by_source)
        else:
            tokens = {
                _octave(length): (computed, valid)
                for length, (_, computed, valid) in sorted(stage.by_length.items())
            }
        for name, pair in tokens.items():
            cells.setdefault(name, {})[column] = pair
    if not cells:
        return None
    names = sorted(cells) if by == "source" else sorted(cells, key=lambda name: int(name.partition("-")[0]))
    return HeatMap(
        by,
        tuple(stage.step for stage in stages),
        {
            name: tuple(
                part[1] / part[0] if (part := cells[name].get(column)) and part[0] else None
                for column in range(len(stages))
            )
            for name in names
        },
    )


def _octave(length: int) -> str:
    return f"{length}-{2 * length - 1}" if length > 1 else f"{length}"


# ---- for people -------------------------------------------------------------------------------------------


def _totals(report: TokenReport) -> str:
    skew = "" if report.rank_skew is None else f"{report.rank_skew:.2f}"
    rows = [
        ("computed · 计算", _count(report.computed)),
        ("valid · 有效", _count(report.valid)),
        ("trained · 参与训练", _count(report.trained)),
        ("effective · 留存", _count(report.effective)),
        ("skipped by the optimizer · 优化器跳过", _count(report.skipped or None)),
        ("routed to experts · 路由到专家", _count(report.routed)),
        ("padding · 填充", _percent(report.padding_ratio)),
        ("row length, mean · 行长均值", _number(report.mean_length)),
        ("row length, 95 % · 行长 95 分位", _number(report.p95_length)),
        ("widest row, padding included · 最大行宽（含填充）", _count(report.widest)),
        ("rows that fill it, perhaps cut · 填满该宽度的行（可能被截断）", _percent(report.full_row_ratio)),
        (f"valid of rank {report.fullest_rank} / mean of all ranks · 最多的 rank / 均值", skew),
    ]  # fmt: skip
    return _table((), [row for row in rows if row[1]])


def _histogram(report: TokenReport) -> str:
    if not report.histogram:
        return ""
    octaves: dict[str, int] = {}
    for length, rows in report.histogram:
        name = _octave(1 << (length.bit_length() - 1) if length else 0)
        octaves[name] = octaves.get(name, 0) + rows
    most = max(octaves.values())
    bars = "".join(
        f'<tr><td>{name}</td><td>{rows:,}</td><td style="width:30rem">'
        f'<div class="bar" style="width:{100 * rows / most:.1f}%"></div></td></tr>'
        for name, rows in octaves.items()
    )
    return (
        "<h2>Rows by valid tokens · 按有效词元数分布的行</h2><small>a sample, scaled up · 抽样估计</small>"
        f"<table><tbody>{bars}</tbody></table>"
    )


def _sources(report: TokenReport) -> str:
    if not report.sources:
        return ""
    total = sum(tokens.get("valid", 0) for tokens in report.sources.values())
    rows: list[tuple[str, ...]] = []
    for name, tokens in sorted(report.sources.items(), key=lambda item: -item[1].get("valid", 0)):
        computed, valid = tokens.get("computed"), tokens.get("valid")
        share = valid / total if valid is not None and total else None
        ratio = valid / computed if valid is not None and computed else None
        rows.append((name, _count(computed), _count(valid), _percent(share), _percent(ratio)))
    head = ("source · 来源", "computed · 计算", "valid · 有效", "share · 占比", "valid / computed · 有效率")
    return f"<h2>Data sources · 数据来源</h2>{_table(head, rows)}"


def _heat_map(heat_map: HeatMap | None) -> str:
    if heat_map is None:
        return ""
    head = "".join(f'<th scope="col">{step:,}</th>' for step in heat_map.until)
    body = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(_cell(ratio) for ratio in ratios)}</tr>"
        for name, ratios in heat_map.rows.items()
    )
    what = "source · 来源" if heat_map.by == "source" else "row length · 行长"
    return (
        "<h2>Valid / computed by stage of training · 各训练阶段的有效率</h2>"
        "<small>columns: up to this optimizer step · 列：截至该优化器步</small>"
        f"<table><thead><tr><th>{what}</th>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _cell(ratio: float | None) -> str:
    if ratio is None:
        return "<td></td>"
    red, green, blue = heat_color(ratio)
    return f'<td class="cell" style="background:rgb({red},{green},{blue})">{100 * ratio:.0f}%</td>'


def heat_color(ratio: float) -> tuple[int, int, int]:
    """From orange (0: all padding) over white to blue (1: none); dark text is readable on all of it."""
    low, middle, high = (245, 158, 66), (255, 255, 255), (120, 170, 255)
    start, end, part = (low, middle, 2 * ratio) if ratio < 0.5 else (middle, high, 2 * ratio - 1)
    mixed = [round(a + (b - a) * min(max(part, 0.0), 1.0)) for a, b in zip(start, end, strict=True)]
    return mixed[0], mixed[1], mixed[2]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    top = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{top}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
