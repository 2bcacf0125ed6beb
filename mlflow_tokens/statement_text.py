"""The cost statement for people, English and Chinese side by side, and for programs."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from decimal import ROUND_HALF_EVEN, Decimal
from html import escape
from typing import Any

from mlflow_tokens.pricing import Price
from mlflow_tokens.statement import Item, Statement, Unknown, Unseen

SCHEMA = 1

TITLE = "What the money of this run bought · 本次运行的花费换来了什么"

_ITEMS: dict[Item, str] = {
    "effective": "training, valid tokens · 训练（有效词元）",
    "padding": "training, padding · 训练（填充）",
    "train": "training, with its padding · 训练（含填充）",
    "data_wait": "waiting for data · 等待数据",
    "eval": "evaluation · 评估",
    "checkpoint": "writing checkpoints · 写检查点",
    "startup": "startup · 启动",
    "restart": "restarts · 重启",
    "other": "other · 其他",
    "lost": "rolled back, lost · 回滚而丢失",
}
_UNKNOWN: dict[Unknown, str] = {
    "no_price": "no price was given · 未给出单价",
    "unpriced": "for a part of the time no price is known · 部分时间的单价未知",
    "mixed_currencies": "prices in several currencies · 单价使用了多种货币",
    "ranks_missing": "not every rank has reported · 部分 rank 没有上报",
    "past_unknown": "the run's earlier part is unknown · 本次运行较早的部分未知",
}
_UNSEEN: dict[Unseen, str] = {
    "before_start": "time before the processes started, storage and network · 进程启动前的时间、存储与网络",
    "host_power": "power of hosts and cooling · 主机与制冷的电费",
    "gaps": "gaps between allocations, which were not billed · 两次资源分配之间未计费的空档",
    "past_prices": "prices of the part that was recorded elsewhere · 记录在别处的部分所用的单价",
    "fates": "which part was rolled back · 哪一部分被回滚",
    "padding": "padding: valid tokens are unknown · 填充：有效词元未知",
}
_STYLE = """
body { font: 15px/1.5 system-ui, "Noto Sans CJK SC", sans-serif; margin: 2rem auto; max-width: 52rem; padding: 0 1rem; color: #1f2328; background: #fff }
h1 { font-size: 1.3rem } table { border-collapse: collapse; margin: 1rem 0 } td { padding: .2rem .8rem .2rem 0; font-variant-numeric: tabular-nums; white-space: pre-wrap }
td + td { text-align: right } tr.total td { border-bottom: 1px solid #d1d9e0; font-weight: 600 }
.bar { background: #4c8dff; height: .7rem } small { color: #59636e }
"""  # noqa: E501


def to_text(statement: Statement) -> str:
    """One screen for a log."""
    rows = [*_head(statement), *_money(statement)]
    width = max((_width(label) for label, _ in rows), default=0)
    lines = [f"  {label}{' ' * (width - _width(label))}  {value}" for label, value in rows]
    return "\n".join([TITLE, *lines, *(f"  {line}" for line in _foot(statement))])


def to_html(statement: Statement) -> str:
    """One file that asks nobody for anything."""
    shares = {_ITEMS[line.item]: line.share for line in statement.lines}
    rows = []
    for label, value in (*_head(statement), *_money(statement)):
        share = shares.get(label)
        bar = f'<div class="bar" style="width:{15 * share:.2f}rem"></div>' if share is not None else ""
        kind = ' class="total"' if label == _TOTAL else ""
        rows.append(f"<tr{kind}><td>{escape(label)}</td><td>{escape(value)}</td><td>{bar}</td></tr>")
    foot = "".join(f"<p><small>{escape(line)}</small></p>" for line in _foot(statement))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{TITLE}</title>'
        f"<style>{_STYLE}</style><h1>{TITLE}</h1><table>{''.join(rows)}</table>{foot}</html>"
    )


def to_markdown(statement: Statement) -> str:
    """For the note of a run."""
    rows = [f"| {label} | {value} |" for label, value in (*_head(statement), *_money(statement))]
    return "\n".join(["| | |", "|---|---:|", *rows, "", *(f"*{line}*  " for line in _foot(statement))])


def to_json(statement: Statement) -> str:
    """For programs; amounts are exact decimals, as text."""
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "status": statement.status,
        "currency": statement.currency,
        "total": _exact(statement.total),
        "lines": [
            {"item": line.item, "amount": str(line.amount), "share": line.share} for line in statement.lines
        ],
        "straggler_at_least": _exact(statement.straggler),
        "cost_per_million_tokens": _exact(statement.per_million),
        "cost_per_million_computed_tokens": _exact(statement.per_million_computed),
        "tokens": {
            "computed": statement.computed,
            "valid": statement.valid,
            "effective": statement.effective,
        },
        "devices": statement.devices,
        "device_type": statement.device_type,
        "device_hours": statement.device_hours,
        "gap_hours": statement.gap_hours,
        "prices": [_price_values(price) for price in statement.prices],
        "unknown": statement.unknown,
        "not_seen": statement.unseen,
        "saving_by_packing": _exact(statement.saving),
    }
    return json.dumps(values, ensure_ascii=False, indent=1)


_TOTAL = "total · 合计"


def _head(statement: Statement) -> Iterator[tuple[str, str]]:
    currency = statement.currency or ""
    if statement.effective is not None:
        yield "effective tokens · 有效留存词元", f"{statement.effective:,}"
    elif statement.computed is not None:
        yield "computed tokens · 计算词元", f"{statement.computed:,}"
    per_million, what = statement.per_million, "effective · 有效留存"
    if per_million is None:
        per_million, what = statement.per_million_computed, "computed · 计算"
    if per_million is not None:
        yield f"per million, {what}", f"{_amount(per_million)} {currency}"
    if statement.device_hours is not None:
        devices = f"{statement.devices} x {statement.device_type}"
        yield f"device-hours, {devices} · 设备小时", f"{statement.device_hours:,.4g}"
    if statement.gap_hours is not None:
        yield "gaps, not billed, device-hours · 未计费空档", f"{statement.gap_hours:,.4g}"


def _money(statement: Statement) -> Iterator[tuple[str, str]]:
    if statement.total is None:
        return
    yield _TOTAL, f"{_amount(statement.total)} {statement.currency}"
    for line in statement.lines:
        yield _ITEMS[line.item], f"{_amount(line.amount)}  {100 * line.share:5.1f} %"


def _foot(statement: Statement) -> Iterator[str]:
    if statement.total is None:
        yield "No cost · 无成本：" + "; ".join(_UNKNOWN[reason] for reason in statement.unknown)
    for price in statement.prices:
        yield f"price · 单价: {_price(price)}"
    if statement.straggler is not None:
        yield (
            f"of training, waiting for another rank's data, at least · 训练中至少有 "
            f"{_amount(statement.straggler)} {statement.currency} 用于等待其他 rank 的数据"
        )
    if statement.unseen:
        yield "not in these numbers · 未计入: " + "; ".join(_UNSEEN[each] for each in statement.unseen)
    if statement.saving is not None and statement.padding_share is not None:
        share, money = (
            f"{100 * statement.padding_share:.0f} %",
            f"{_amount(statement.saving)} {statement.currency}",
        )
        yield (
            f"advice · 建议: {share} padding: group rows by length or pack them, up to {money} less · "
            f"填充占 {share}：按长度分组或打包，最多可省 {money}"
        )


def _price(price: Price) -> str:
    said = [str(price), price.source, price.date.isoformat() if price.date else ""]
    return ", ".join(word for word in said if word)


def _price_values(price: Price) -> dict[str, Any]:
    return {
        "amount": str(price.amount),
        "currency": price.currency,
        "unit": price.unit,
        "devices_per_instance": price.devices_per_instance,
        "kind": price.kind,
        "source": price.source,
        "date": price.date.isoformat() if price.date else None,
    }


def _amount(amount: Decimal) -> str:
    """Two decimals, and four significant digits where that says nothing."""
    if amount and abs(amount) < 1:
        digits = 3 - amount.adjusted()
        return f"{amount.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_EVEN):f}"
    return f"{amount.quantize(Decimal('0.01'), ROUND_HALF_EVEN):,f}"


def _exact(amount: Decimal | None) -> str | None:
    return None if amount is None else str(amount)


def _width(text: str) -> int:
    """Columns on a terminal: Chinese characters take two (UAX #11)."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)
