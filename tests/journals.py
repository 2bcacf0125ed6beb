"""Hand-made journal records for tests."""

from __future__ import annotations

from typing import Any

from mlflow_tokens.pricing import parse_price
from mlflow_tokens.records import PriceSet, Quantities, SegmentStart


def segment(
    name: str = "a",
    devices_by_node: tuple[int, ...] = (1,),
    device_type: str = "cpu-worker",
    *,
    allocation: str = "",
    boot: str = "",
    bill_gaps: bool = False,
) -> SegmentStart:
    return SegmentStart(
        segment=name,
        allocation=allocation or name,
        t_wall=0.0,
        world_size=sum(devices_by_node),
        device_type=device_type,
        devices_by_node=devices_by_node,
        token_definition="valid = computed - padding; trained = labels != -100",
        valid_source="mask",
        topology="data parallel",
        version="0",
        boot=boot,
        bill_gaps=bill_gaps,
    )


def price(text: str, t_wall: float = 0.0) -> PriceSet:
    parsed = parse_price(text)
    assert parsed is not None
    return PriceSet(t_wall, parsed)


def quantities(name: str = "a", device_type: str = "cpu-worker", ranks: int = 1, **values: Any) -> Quantities:
    """Quantities with seconds by phase as keywords: train=10.0, eval=60.0."""
    phases = ("startup", "restart", "train", "data_wait", "eval", "checkpoint", "other")
    seconds = {phase: values.pop(phase) for phase in phases if phase in values}
    tokens = {kind: values.pop(kind) for kind in ("computed", "valid", "trained") if kind in values}
    fields = {
        "seq": 1,
        "kind": "step",
        "step": 10,
        "position": 10,
        "micro_batches": 10,
        "t_mono": 0.0,
        "t_wall": 1_700_000_000.0,
        "elapsed": sum(seconds.values()) / ranks,
        "ranks_reporting": ranks,
    } | values
    return Quantities(segment=name, tokens=tokens, device_seconds={device_type: seconds}, **fields)
