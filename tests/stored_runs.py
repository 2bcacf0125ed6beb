"""Runs with hand-made numbers, written into a sqlite store as the MLflow sink would write them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

START_MS = 1_760_000_000_000
STEP_MS = 10_000


@dataclass(frozen=True)
class StoredRun:
    """Final figures of a run. Tokens grow evenly over its steps; so does the cost, after `startup_cost`."""

    name: str
    experiment: str = "pretrain"
    cost: float | None = None
    startup_cost: float = 0.0
    computed: float | None = None
    valid: float | None = None
    trained: float | None = None
    effective: float | None = None
    currency: str | None = "CNY"
    price: str | None = "2.0 CNY/device-hour"
    definition: str | None = "attention mask"
    device_type: str = "A800"
    devices: int = 8
    tokens_per_second: float | None = None
    device_hours: float | None = None
    steps: int = 4
    status: str = "FINISHED"

    def metrics(self, step: int) -> dict[str, float]:
        """The base series at the step (1 … steps)."""
        share = step / self.steps
        values: dict[str, float | None] = {
            f"tokens/{kind}": None if total is None else float(int(total * share))
            for kind, total in (
                ("computed", self.computed),
                ("valid", self.valid),
                ("trained", self.trained),
                ("effective", self.effective),
            )
        }
        if self.cost is not None:
            values["cost/total"] = self.startup_cost + (self.cost - self.startup_cost) * share
            if values["tokens/effective"]:
                values["cost/per_million_tokens"] = 1e6 * values["cost/total"] / values["tokens/effective"]
        if self.tokens_per_second is not None:
            values["throughput/tokens_per_second_average"] = self.tokens_per_second
            values["throughput/tokens_per_second_per_device_average"] = self.tokens_per_second / self.devices
        if self.device_hours is not None:
            values["device/hours"] = self.device_hours * share
        return {name: value for name, value in values.items() if value is not None}

    def tags(self) -> dict[str, str]:
        """The tags that mlflow_tokens sets; what is unknown has none."""
        tags = {
            "schema": "1",
            "currency": self.currency,
            "price": self.price,
            "token_definition": self.definition,
            "device_type": self.device_type,
            "devices": str(self.devices),
        }
        return {f"mlflow_tokens.{name}": value for name, value in tags.items() if value is not None}


#: Cost per million, worked out by hand (effective / valid / trained / computed):
#:   packed    4.00 CNY            2.5 / 2.5 / 2.580645… / 2.5
#:   grouped   4.80 CNY            4.0 / 3.0 / 3.2       / 2.4
#:   padded    8.00 CNY            5.0 / 5.0 / 5.333333… / 2.0
#:   hostile   9.00 CNY            unknown but 9.0 for computed
#:   cluster   1,234,567.89 USD    120.431737… of 10,251,184,259 tokens, of whatever kind
#:   unpriced  none
HOSTILE_NAME = "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
RUNS = (
    StoredRun(
        "padded",
        "pretrain",
        8.0,
        0.8,
        4e6,
        1.6e6,
        1.5e6,
        1.6e6,
        tokens_per_second=160_000.0,
        device_hours=4.0,
    ),
    StoredRun(
        "grouped", "pretrain", 4.8, 0.4, 2e6, 1.6e6, 1.5e6, 1.2e6, tokens_per_second=9_000.0, device_hours=2.4
    ),
    StoredRun(
        "packed",
        "pretrain",
        4.0,
        0.4,
        1.6e6,
        1.6e6,
        1.55e6,
        1.6e6,
        tokens_per_second=72_000.0,
        device_hours=2.0,
    ),
    StoredRun(HOSTILE_NAME, "sft", 9.0, 0.0, 1e6, status="KILLED"),
    StoredRun(
        "cluster",
        "sft",
        1_234_567.89,
        0.0,
        *([10_251_184_259] * 4),
        currency="USD",
        price="98.32 USD/instance-hour x8",
        device_type="H800",
        devices=1024,
        tokens_per_second=7.2e9,
        device_hours=617_283.945,
    ),
    StoredRun(
        "unpriced",
        "sft",
        None,
        0.0,
        3e6,
        2e6,
        2e6,
        2e6,
        currency=None,
        price=None,
        tokens_per_second=50_000.0,
        status="FAILED",
    ),
)


def copied_store(empty_store: Path, folder: Path) -> str:
    """The URI of a copy of the empty sqlite store, in the folder."""
    return f"sqlite:///{shutil.copy(empty_store, folder / 'mlflow.db')}"


def store_runs(uri: str, runs: tuple[StoredRun, ...] = RUNS) -> dict[str, str]:
    """Write the runs, started one second after another; their ids by name."""
    client = MlflowClient(tracking_uri=uri)
    return {run.name: _store_run(client, run, START_MS + 1000 * place) for place, run in enumerate(runs)}


def _store_run(client: MlflowClient, run: StoredRun, start_ms: int) -> str:
    run_id = client.create_run(experiment_id(client, run.experiment), start_ms, run_name=run.name).info.run_id
    metrics = [
        Metric(name, value, start_ms + STEP_MS * step, step)
        for step in range(1, run.steps + 1)
        for name, value in run.metrics(step).items()
    ]
    for begin in range(0, len(metrics), 900):
        client.log_batch(run_id, metrics=metrics[begin : begin + 900])
    tags = [RunTag(name, value) for name, value in run.tags().items()]
    client.log_batch(run_id, params=[Param("batch_size", "8")], tags=tags)
    client.set_terminated(run_id, run.status, start_ms + STEP_MS * run.steps)
    return run_id


def experiment_id(client: MlflowClient, name: str) -> str:
    """The id of the experiment, which is created where there is none."""
    found = client.get_experiment_by_name(name)
    return found.experiment_id if found else client.create_experiment(name)
