"""What a run says about itself: the head of its journal and its tags in MLflow."""

from __future__ import annotations

import os
import time
import uuid

from mlflow_tokens import __version__
from mlflow_tokens.allocation import allocation_of, boot_id
from mlflow_tokens.hardware.devices import device_type
from mlflow_tokens.metrics import METRICS_SCHEMA
from mlflow_tokens.options import Options
from mlflow_tokens.pricing import Price
from mlflow_tokens.ranks import Job
from mlflow_tokens.records import SegmentStart
from mlflow_tokens.topology import Topology


def describe_segment(job: Job, options: Options, topology: Topology | None) -> SegmentStart:
    """A new segment of this job, beginning now."""
    segment = uuid.uuid4().hex
    policy = options.pad_policy
    return SegmentStart(
        segment=segment,
        allocation=allocation_of(os.environ),
        t_wall=time.time(),
        world_size=job.world_size,
        device_type=device_type(),
        devices_by_node=job.devices_by_node,
        token_definition=f"valid = computed - padding; trained = labels != {policy.ignore_index}",
        valid_source=str(policy),
        topology=f"data {job.world_size}" if topology is None else str(topology),
        version=__version__,
        boot=boot_id(),
        bill_gaps=options.bill_gaps,
    )


def tags_of(segment: SegmentStart, price: Price | None) -> dict[str, str]:
    """Tags of the run, under `mlflow_tokens.`; runs are compared by them."""
    tags = {
        "schema": METRICS_SCHEMA,
        "version": segment.version,
        "token_definition": segment.token_definition,
        "valid_source": segment.valid_source,
        "topology": segment.topology,
        "device_type": segment.device_type,
        "devices": str(sum(segment.devices_by_node)),
    }
    if price is not None:
        tags |= {"currency": price.currency, "price": str(price), "price_source": price.source}
        tags |= {"price_date": price.date.isoformat()} if price.date else {}
        tags |= {"price_kind": price.kind} if price.kind else {}
    return {f"mlflow_tokens.{key}": value for key, value in tags.items()}
