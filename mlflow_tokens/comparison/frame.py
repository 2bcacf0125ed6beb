"""`mlflow_tokens.compare()`: the ranking as a pandas DataFrame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from mlflow_tokens.comparison.mlflow_reader import MlflowReader
from mlflow_tokens.comparison.table import RankedRun, rank

_INTEGERS = ("rank", "tokens_computed", "tokens_valid", "tokens_trained", "tokens_effective")

if TYPE_CHECKING:
    import pandas


def compare(
    experiments: str | Sequence[str] | None = None, *, tracking_uri: str | None = None, by: str = "effective"
) -> pandas.DataFrame:
    """Rank the runs of one or more experiments by cost per million tokens, cheapest first.

    Args:
        experiments: a name, several names, or None for all experiments.
        tracking_uri: the MLflow store; default is MLflow's own (MLFLOW_TRACKING_URI).
        by: what the cost is divided by: effective, valid, trained or computed tokens.

    Returns:
        One row a run, one column a field of `mlflow_tokens.comparison.table.RankedRun`. Rows of different
        `group` (another currency or token definition) are ranked apart. Unknown is missing (NA).

    Raises:
        ValueError: `by` is none of these.
        mlflow_tokens.comparison.ReadError: the store cannot be read, or has no such experiment.
    """
    import pandas

    names = [experiments] if isinstance(experiments, str) else experiments
    lines = rank(MlflowReader(tracking_uri).runs(names), by)
    frame = pandas.DataFrame(
        [asdict(line) for line in lines], columns=[item.name for item in fields(RankedRun)]
    )
    # Token counts are whole numbers even where some are missing: NumPy's own integers have no missing value.
    integers = [name for name in frame.columns if name in _INTEGERS]
    return frame.astype(dict.fromkeys(integers, "Int64"))
