"""When a snapshot is due and where it lands, against a brute-force recount."""

from __future__ import annotations

import pytest

from mlflow_tokens.cadence import Cadence, Heartbeat, interval_at


def own_snapshots(cadence: Cadence, steps: int) -> list[int]:
    positions = (cadence.after_step(step, step) for step in range(1, steps + 1))
    return [position for position in positions if position is not None]


def test_without_a_script_that_logs_every_tenth_step_is_logged() -> None:
    assert own_snapshots(Cadence(10), 35) == [10, 20, 30]


def test_the_interval_doubles_after_every_200_snapshots() -> None:
    taken = own_snapshots(Cadence(1), 1400)
    # 200 at 1 apart (to 200), 200 at 2 apart (to 600), 200 at 4 apart (to 1400)
    assert taken == [*range(1, 201), *range(202, 602, 2), *range(604, 1404, 4)]


@pytest.mark.parametrize(("steps", "most"), [(10_000, 700), (100_000, 1_250), (1_000_000, 2_000)])
def test_a_long_run_has_at_most_about_2000_snapshots(steps: int, most: int) -> None:
    step, taken = 0, 0
    while (step := step + interval_at(step, 10)) <= steps:
        taken += 1
    assert 400 < taken <= most


def test_a_script_that_counts_from_0_is_followed_so_that_both_join() -> None:
    cadence, ours, scripts = Cadence(10), [], []
    for index in range(100):
        ours.append(cadence.after_step(index + 1, index + 1))
        if index % 20 == 0:
            scripts.append(index)
            ours.append(cadence.after_script_log(index, index + 1, index + 1))
    assert scripts == [0, 20, 40, 60, 80]
    # At 10 nobody could know yet that the script logs every 20 steps.
    assert [position for position in ours if position is not None] == [0, 10, 20, 40, 60, 80]


def test_a_script_that_logs_every_step_is_followed_at_every_tenth() -> None:
    cadence, ours = Cadence(10), []
    for step in range(1, 101):
        ours.append(cadence.after_step(step, step))
        ours.append(cadence.after_script_log(step, step, step))
    assert [position for position in ours if position is not None] == [1, *range(11, 101, 10)]


def test_a_script_that_counts_micro_batches_is_followed() -> None:
    cadence, ours = Cadence(10), []
    for micro_batch in range(400):  # 8 to a step, logged by their index
        if micro_batch % 8 == 7:
            ours.append(cadence.after_step((micro_batch + 1) // 8, micro_batch + 1))
        if micro_batch % 80 == 0:
            ours.append(cadence.after_script_log(micro_batch, micro_batch // 8, micro_batch + 1))
    assert [position for position in ours if position is not None] == [10, 80, 160, 240, 320]


def test_a_script_that_logs_by_epoch_is_not_followed() -> None:
    cadence, ours = Cadence(10), []
    for step in range(1, 101):
        ours.append(cadence.after_step(step, step))
        if step % 50 == 0:
            ours.append(cadence.after_script_log(step // 50, step, step))
    assert [position for position in ours if position is not None] == list(range(10, 101, 10))


def test_a_script_that_never_names_a_step_is_not_followed_for_long() -> None:
    cadence, ours = Cadence(10), []
    for step in range(1, 41):
        ours.append(cadence.after_step(step, step))
        ours.append(cadence.after_script_log(0, step, step))  # MLflow's default
    # 0 fits a count from 0 at the first step, and nothing after it.
    assert [position for position in ours if position is not None] == [0, 10, 20, 30]


def test_a_script_that_falls_silent_does_not_silence_us() -> None:
    cadence = Cadence(10)
    for step in range(1, 41):
        cadence.after_step(step, step)
        if step <= 20:
            cadence.after_script_log(step, step, step)
    taken = [step for step in range(41, 101) if cadence.after_step(step, step) is not None]
    assert taken == [51, 71, 91]  # the last one was at 31, the wait is twice the interval


def test_positions_never_go_back() -> None:
    cadence = Cadence(10)
    assert cadence.after_step(10, 40) == 10
    assert cadence.after_script_log(39, 10, 40) == 39  # it counts micro-batches from 0
    assert cadence.position(11, 44) == 43
    assert cadence.after_script_log(79, 20, 80) == 79
    assert cadence.after_script_log(3, 30, 120) is None  # an epoch number
    assert cadence.position(30, 120) == 119


def test_heartbeats_come_after_30_60_120_seconds_of_silence_and_then_every_10_minutes() -> None:
    heartbeat, now, beats = Heartbeat(0.0), 0.0, []
    while now < 3600:
        now += max(heartbeat.seconds_left(now), 0.0)
        heartbeat.beat(now)
        beats.append(now)
    assert beats[:7] == [30, 90, 210, 450, 930, 1530, 2130]
    heartbeat.snapshot_taken(5000.0)
    assert heartbeat.seconds_left(5000.0) == 30.0
