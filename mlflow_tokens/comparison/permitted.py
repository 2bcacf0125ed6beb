"""A reader that shows what one user may read, and nothing by which the rest could be told to exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlflow_tokens.comparison.mlflow_reader import MlflowReader
from mlflow_tokens.comparison.reader import Curve, Experiment, MissingError, RunRow, named

#: Of the ids of some experiments those that may be read.
MayRead = Callable[[list[str]], list[str]]


class PermittedReader:
    """A `Reader` for one user, made within the request that asks."""

    def __init__(self, reader: MlflowReader, may_read: MayRead) -> None:
        self._reader, self._may_read = reader, may_read

    def experiments(self) -> list[Experiment]:
        """Every active experiment that may be read, by name."""
        known = self._reader.experiments()
        allowed = set(self._may_read([experiment.experiment_id for experiment in known]))
        return [experiment for experiment in known if experiment.experiment_id in allowed]

    def runs(self, experiments: Sequence[str] | None = None) -> list[RunRow]:
        """Runs of the experiments with these names that may be read (all such when None).

        Raises:
            MissingError: there is no such experiment, or it may not be read.
            ReadError: the store cannot be reached.
        """
        allowed = named(self.experiments(), experiments)
        ids = {experiment.experiment_id for experiment in allowed}
        rows = self._reader.runs([experiment.name for experiment in allowed]) if allowed else []
        return [row for row in rows if row.experiment_id in ids]

    def curves(self, run_ids: Sequence[str], metric: str, max_points: int = 1000) -> list[Curve]:
        """One curve a run that has the metric.

        Raises:
            MissingError: there is no such run, or it may not be read.
            ReadError: the store cannot be reached.
        """
        for run_id in run_ids:
            self._check(run_id)
        return self._reader.curves(run_ids, metric, max_points)

    def _check(self, run_id: str) -> None:
        try:
            experiment = self._reader.experiment_of(run_id)
        except MissingError:
            experiment = None
        if experiment is None or not self._may_read([experiment]):
            # The same words for both: a guess must not tell whether there is such a run.
            raise MissingError(f"no run {run_id!r}") from None
