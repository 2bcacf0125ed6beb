"""Snapshots as VisualDL scalars, and the exact integers beside them.

VisualDL keeps scalars as 32-bit floats, in which 1,234,567,890,123 is 1,234,567,954,432: it carries the
curves. What must be exact is in `mlflow_tokens.json` in the same directory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow_tokens.metrics import Snapshot
from mlflow_tokens.sinks.base import EXIT_TIMEOUT_LOCAL

#: A directory of our own: of several record files in one directory VisualDL shows only the last.
SUBDIRECTORY = "tokens"
FILE_NAME = "vdlrecords.tokens.log"
SIDECAR_NAME = "mlflow_tokens.json"


def require_visualdl() -> None:
    """Raises ImportError, saying what to install, where VisualDL is missing."""
    try:
        import visualdl  # noqa: F401
    except ImportError as error:
        raise ImportError("visualdl=… needs VisualDL: pip install 'mlflow-tokens[visualdl]'") from error


class VisualDLSink:
    """Writes under `<log directory>/tokens/`, made when the first snapshot comes."""

    name = "VisualDL"
    in_order = True
    exit_timeout = EXIT_TIMEOUT_LOCAL

    def __init__(self, logdir: Path, tags: Mapping[str, str]) -> None:
        self._directory = logdir / SUBDIRECTORY
        self._tags = dict(tags)
        self._writer: Any = None

    def write(self, snapshots: Sequence[Snapshot]) -> None:
        """Add a scalar for every metric, then replace the sidecar."""
        if self._writer is None:
            from visualdl import LogWriter

            self._writer = LogWriter(logdir=str(self._directory), file_name=FILE_NAME)
        for snapshot in snapshots:
            for name, value in snapshot.metrics.items():
                self._writer.add_scalar(
                    tag=name, value=float(value), step=snapshot.position, walltime=snapshot.timestamp_ms
                )
        self._write_sidecar(snapshots[-1])

    def close(self, status: str) -> None:
        """Flush and close the record file."""
        if self._writer is not None:
            self._writer.close()

    def _write_sidecar(self, snapshot: Snapshot) -> None:
        content = {
            "tags": self._tags,
            "step": snapshot.step,
            "position": snapshot.position,
            "timestamp_ms": snapshot.timestamp_ms,
            "counts": dict(snapshot.counts),
            # JSON knows no NaN: what has become unknown is null.
            "metrics": {k: v if math.isfinite(v) else None for k, v in snapshot.metrics.items()},
        }
        path = self._directory / SIDECAR_NAME
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(content, ensure_ascii=False, indent=1), "utf-8")
        os.replace(partial, path)
