"""Runs read back: the one interface every page, table and command reads through.

A `Reader` returns plain data. What a number means is not decided here but in `table`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment that the reader may see."""

    experiment_id: str
    name: str


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run as it is stored: latest value of each metric, tags and params. Times in ms since 1970."""

    run_id: str
    run_name: str
    experiment_id: str
    experiment_name: str
    status: str
    user: str = ""
    start_time_ms: int | None = None
    end_time_ms: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of one run, ordered as it was logged. The three columns have one length."""

    run_id: str
    metric: str
    steps: tuple[int, ...]
    timestamps_ms: tuple[int, ...]
    values: tuple[float, ...]


class ReadError(Exception):
    """The store could not be read, or does not hold what was asked for. The message says what to do."""


class MissingError(ReadError):
    """What was asked for is not in the store, which itself answers."""


def named(known: Sequence[Experiment], names: Sequence[str] | None) -> list[Experiment]:
    """The experiments that have these names; all that are known when None.

    Raises:
        MissingError: one of the names is none; the message lists some that are.
    """
    if names is None:
        return list(known)
    if missing := sorted(set(names) - {experiment.name for experiment in known}):
        there = ", ".join(repr(experiment.name) for experiment in known[:10])
        raise MissingError(f"no experiment named {', '.join(map(repr, missing))}; there: {there or 'none'}")
    return [experiment for experiment in known if experiment.name in set(names)]


class Reader(Protocol):
    """A store of runs: MLflow's client, its SQL store, or VisualDL's logs."""

    def experiments(self) -> list[Experiment]:
        """Every active experiment, by name."""

    def runs(self, experiments: Sequence[str] | None = None) -> list[RunRow]:
        """Runs that mlflow_tokens logged to, of the experiments with these names (all when None).

        Raises:
            MissingError: no such experiment.
            ReadError: the store cannot be reached.
        """

    def curves(self, run_ids: Sequence[str], metric: str, max_points: int = 1000) -> list[Curve]:
        """One curve a run that has the metric, thinned evenly to `max_points`, ends kept.

        Raises:
            MissingError: no such run.
            ReadError: the store cannot be reached.
        """
