"""What a checkpoint carries of us: where in which run it was saved, and no totals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mlflow_tokens.records import SCHEMA


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The place of a checkpoint in its run's history.

    run: None where it was not known yet. segment: "" where only rank 0 knows it. step: optimizer step of
    the run. position: on the script's axis. timestamp_ms: the time at which MLflow has its metrics.
    """

    run: str | None
    segment: str
    step: int
    position: int
    timestamp_ms: int

    def to_state(self) -> dict[str, Any]:
        """A plain mapping for `paddle.save`, JSON or pickle."""
        return {"schema": SCHEMA, **asdict(self)}


def checkpoint_of(state: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint that `Checkpoint.to_state` described.

    Raises:
        ValueError: it is not such a mapping, or of another schema.
    """
    if not isinstance(state, Mapping) or state.get("schema") != SCHEMA:
        raise ValueError(f"{str(state)[:80]!r} is not what Tracker.state_dict() of this version gives")
    try:
        run = state["run"]
        return Checkpoint(
            None if run is None else str(run),
            str(state["segment"]),
            int(state["step"]),
            int(state["position"]),
            int(state["timestamp_ms"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the state of Tracker.state_dict() lacks or garbles {error}") from error
