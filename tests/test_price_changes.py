"""A price that changes while a run is recorded, on clocks that are moved by hand; cost by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from mlflow_tokens import run_journal
from mlflow_tokens.account import Account, account_of
from mlflow_tokens.aggregate import Moment
from mlflow_tokens.clock import PHASES
from mlflow_tokens.journal import read_journal
from mlflow_tokens.meter import Reading
from mlflow_tokens.pricing import PriceChoice, choose_price
from mlflow_tokens.pricing.price_file import VARIABLE
from mlflow_tokens.ranks import Question
from mlflow_tokens.recorder import Recorder
from mlflow_tokens.records import PriceSet, Quantities, RunBound
from tests.journals import segment

#: 2026-12-01T09:00:00+08:00.
NINE = 1_796_086_800.0
#: Seconds that the machine has been up at nine.
UP = 1e6

FILE = """
[prices.night]
price = "3.00 USD/device-hour on-demand"
[[prices.night.schedule]]
from = 2026-12-01T10:00:00+08:00
price = "1.00 USD/device-hour spot"
"""


class Process:
    """One device that trains from a minute on; both clocks show the minute that the test sets."""

    def __init__(self, path: Path, choice: PriceChoice, name: str, allocation: str, minute: int) -> None:
        self._path, self._began, self.minute = path, minute, minute
        begun = choice.at(self.time_of_day())
        assert begun is not None
        later = [change for change in choice.changes if change.t_wall > self.time_of_day()]
        self.recorder = Recorder(
            segment=segment(name, allocation=allocation, boot="machine"),
            price=PriceSet(self.time_of_day(), begun),
            price_changes=[PriceSet(change.t_wall, change.price) for change in later],
            bound=RunBound(None, "unused", owned=True),
            journal_path=path,
            collect=self._collect,
            baseline={},
            checkpoint=None,
            position=lambda: 0,
            now=self._now,
            time_of_day=self.time_of_day,
        )
        self.recorder.start([], None)

    def _now(self) -> float:
        return UP + 60.0 * self.minute

    def time_of_day(self) -> float:
        return NINE + 60.0 * self.minute

    def _collect(self, question: Question, timeout: float) -> dict[int, Reading]:
        held = 60.0 * (self.minute - self._began)
        return {0: Reading(0, 1, 1, 10, 10, 10, {phase: held * (phase == "train") for phase in PHASES})}

    def until(self, minute: int, recorded: Callable[[Account], bool]) -> None:
        """Go to this minute, and stay until the recorder has seen it."""
        self.minute = minute
        deadline = time.monotonic() + 30
        while not recorded(account_of(read_journal(self._path))):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def end(self, minute: int) -> None:
        self.minute = minute
        self.recorder.end(Moment("final", Question(1, live=True), 1, self.recorder.wall(), self._now()))


def night(folder: Path) -> PriceChoice:
    path = folder / "prices.toml"
    path.write_text(FILE, "utf-8")
    return choose_price("night", {VARIABLE: str(path)})


def is_spot(account: Account) -> bool:
    return account.price is not None and account.price.kind == "spot"


def test_three_hours_with_a_change_of_price_an_outage_and_a_gap(tmp_path: Path) -> None:
    """On demand at 3.00 until ten, spot at a third from then on.

    Minutes 0 to 80 are trained, 80 to 100 are an outage within the allocation, 100 to 120 are trained; until
    180 the machine is released; 180 to 240 are trained in a second allocation.
    """
    journal, choice = tmp_path / "run.jsonl", night(tmp_path)
    first = Process(journal, choice, "a", "night", 0)
    first.until(60, is_spot)
    first.end(80)
    Process(journal, choice, "b", "night", 100).end(120)
    Process(journal, choice, "c", "day", 180).end(240)
    account = account_of(read_journal(journal))
    # 60 min at 3.00, and 20 + 20 + 20 + 60 at 1.00, are 3 h for 5.00; the gap is an hour, and not billed.
    assert account.cost is not None
    assert round(account.cost, 12) == Decimal("5.00")
    assert account.device_seconds_total == 3 * 3600
    assert account.gap_seconds == 3600
    assert round(account.cost_of(phase="restart"), 12) == round(Decimal(1) / 3, 12)
    assert [str(price) for price in account.prices] == [
        "3.00 USD/device-hour on-demand",
        "1.00 USD/device-hour spot",
    ]


def test_a_heartbeat_comes_before_the_new_price(tmp_path: Path) -> None:
    journal = tmp_path / "run.jsonl"
    process = Process(journal, night(tmp_path), "a", "night", 0)
    process.until(60, is_spot)
    process.end(61)
    kept = [record for record in read_journal(journal) if isinstance(record, PriceSet | Quantities)]
    place = max(number for number, record in enumerate(kept) if isinstance(record, PriceSet))
    before = kept[place - 1]
    assert isinstance(before, Quantities)
    assert (before.kind, before.elapsed) == ("heartbeat", 3600)


def test_a_full_journal_still_says_what_was_held_at_the_old_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full journal leaves heartbeats out; this one must not be: it ends the old price."""
    monkeypatch.setattr(run_journal, "FULL", 1)
    journal = tmp_path / "run.jsonl"
    process = Process(journal, night(tmp_path), "a", "night", 0)
    process.until(30, lambda account: account.device_seconds_total == 1800)
    process.until(60, is_spot)
    process.end(120)
    account = account_of(read_journal(journal))
    assert account.cost is not None
    assert round(account.cost, 12) == Decimal("4.00")  # an hour at 3.00 and one at 1.00
