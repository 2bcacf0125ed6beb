"""The journal of a run that is under way: one that cannot be written is said so once, and tried again."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

from mlflow_tokens.journal import FULL, Journal, JournalTaken
from mlflow_tokens.notices import logger, say_once
from mlflow_tokens.records import Record, SnapshotKind

#: Seconds between snapshots once the journal has its full size.
INTERVAL_WHEN_FULL = 3600.0


class RunJournal:
    """Written by several threads. Nothing raises, but the first.

    Raises:
        JournalTaken: another process is writing it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._journal: Journal | None = None
        try:
            self._journal = Journal(path)
        except JournalTaken:
            raise
        except OSError as error:
            say_once(
                "journal",
                "No journal can be kept in %s (%s); what a sink misses is lost.",
                path.parent,
                error,
            )

    @property
    def is_open(self) -> bool:
        """Whether there is a file to write to."""
        return self._journal is not None

    def append(self, record: Record) -> None:
        """Write one record, or keep it for later."""
        with self._lock:
            if self._journal is None:
                return
            try:
                self._journal.append(record)
            except OSError as error:
                say_once(
                    "journal", "The journal %s cannot be written (%s); it is tried again.", self.path, error
                )

    def write_rest(self) -> None:
        """There may be room again for what the disk has not taken, and the next record may never come."""
        with self._lock:
            if self._journal is not None:
                with suppress(OSError):  # which was said when it began
                    self._journal.write_rest()

    def name_after(self, run: str) -> None:
        """Give it the name of its run."""
        with self._lock:
            if self._journal is not None and self._journal.path.stem != run:
                # Else it is found by the run's id that is in it.
                with suppress(OSError):
                    self._journal.rename(f"{run}.jsonl")
                    self.path = self._journal.path

    def leaves_out(self, kind: SnapshotKind, seconds_since: float) -> bool:
        """Whether a snapshot is left out of a journal that has its full size.

        That of a checkpoint is not: a job may resume from it. seconds_since: the last one that was not.
        """
        journal = self._journal
        if journal is None or journal.size < (2 * FULL if kind == "checkpoint" else FULL):
            return False
        say_once("full", "The journal %s has its full size; one snapshot an hour from here on.", journal.path)
        return seconds_since < INTERVAL_WHEN_FULL

    def where_the_rest_is(self) -> str:
        """For a message about what has not reached the sinks."""
        if self._journal is None:
            return "no journal has it."
        return f"all of it is in {self.path}. `mlflow-tokens sync {self.path.parent}` brings it to MLflow."

    def close(self) -> None:
        """Hand it to the disk; what comes after is not kept."""
        with self._lock:
            if self._journal is not None:
                try:
                    self._journal.close()
                except OSError as error:
                    logger.warning("The journal %s is not complete: %s", self.path, error)
                self._journal = None
