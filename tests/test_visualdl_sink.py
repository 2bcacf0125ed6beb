"""The VisualDL sink on a real disk; what VisualDL's own reader finds in the file is compared with a list
made by hand."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from visualdl import LogReader, LogWriter

from mlflow_tokens import notices
from mlflow_tokens.sinks.visualdl import VisualDLSink
from mlflow_tokens.snapshot import Point, Snapshot
from tests.test_jsonl_sink import no_file_beyond

TAGS = {"mlflow_tokens.currency": "CNY", "mlflow_tokens.device_type": "昇腾 910B"}
#: How a child of these tests begins.
CHILD = """
import os, signal, sys
from pathlib import Path
from tests.test_visualdl_sink import TAGS, snapshot
from mlflow_tokens.sinks.visualdl import VisualDLSink
sink = VisualDLSink(Path(sys.argv[1]), TAGS)
"""


def snapshot(seq: int, timestamp_ms: int | None = None, high_water: int | None = None) -> Snapshot:
    """Two points at step 10 x seq, a second after the last one."""
    return Snapshot(
        kind="step",
        seq=seq,
        step=10 * seq,
        position=10 * seq,
        timestamp_ms=1_700_000_000_000 + 1000 * seq if timestamp_ms is None else timestamp_ms,
        metrics={"tokens/computed": 4096.0 * seq, "cost/total": 0.5 * seq},
        counts={"tokens/computed": 4096 * seq},
        high_water=high_water,
    )


def points_of(*seqs: int) -> list[tuple[Point, float]]:
    """What `snapshot(seq)` should leave in a file, in its order."""
    return [
        point
        for seq in seqs
        for point in (
            (("tokens/computed", 10 * seq, 1_700_000_000_000 + 1000 * seq), 4096.0 * seq),
            (("cost/total", 10 * seq, 1_700_000_000_000 + 1000 * seq), 0.5 * seq),
        )
    ]


def record_file(logdir: Path) -> Path:
    """The one file that VisualDL would read, by its own choice."""
    reader = LogReader()
    # Not LogReader(logdir): it reads at once, and shares what it read with every other one of the process.
    reader.dir = [str(logdir)]
    ((directory, name),) = reader.logs().items()
    return Path(directory) / name


def shown(logdir: Path) -> list[tuple[Point, float]]:
    """Every scalar that VisualDL's reader finds in that file, sorted."""
    reader = LogReader(file_path=str(record_file(logdir)))
    return sorted(
        ((tag, value.id, value.timestamp), value.value)
        for tag in reader.get_tags().get("scalar", [])
        for value in reader.get_data("scalar", tag)
    )


def sidecar(logdir: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((logdir / "tokens" / "mlflow_tokens.json").read_text("utf-8"))
    return content


def written(logdir: Path, *seqs: int) -> Path:
    """A log directory as a process that has ended left it; its record file."""
    sink = VisualDLSink(logdir, TAGS)
    sink.write([snapshot(seq) for seq in seqs])
    sink.close("FINISHED")
    return record_file(logdir)


def catch_up(logdir: Path, *seqs: int) -> None:
    """A new process writes snapshots, but for what is there."""
    sink = VisualDLSink(logdir, TAGS)
    sink.write([snapshot(seq) for seq in seqs], skip=sink.stored())
    sink.close("FINISHED")


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a process that runs CHILD and then a script; it is killed after the test."""
    processes = []

    def start(script: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD + script, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_nothing_is_made_before_the_first_snapshot(tmp_path: Path) -> None:
    sink = VisualDLSink(tmp_path / "vdl", TAGS)
    assert sink.stored() == set()
    sink.write([])
    sink.close("FINISHED")
    assert list(tmp_path.iterdir()) == []


def test_visualdl_shows_each_point_once_and_nothing_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    notices.set_up(silent=False)
    sink = VisualDLSink(tmp_path, TAGS)
    sink.write([snapshot(1), snapshot(2)], skip={points_of(1)[1][0]})
    sink.write([snapshot(3)])
    # Durable before close: this is what a killed process would have left.
    expected = [points_of(1)[0], *points_of(2, 3)]
    assert shown(tmp_path) == sorted(expected)
    assert sink.stored() == {point for point, _ in expected}
    sink.close("FINISHED")
    catch_up(tmp_path, 4)
    assert shown(tmp_path) == sorted([*expected, *points_of(4)])
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "")


def test_totals_of_a_run_below_its_high_water_step_are_written_there(tmp_path: Path) -> None:
    sink = VisualDLSink(tmp_path, TAGS)
    sink.write([snapshot(2, high_water=700)])
    assert {position for (_, position, _), _ in shown(tmp_path)} == {700}


def test_the_bytes_are_those_of_visualdls_own_writer(tmp_path: Path) -> None:
    ours = written(tmp_path / "ours", 1, 2).read_bytes()
    with LogWriter(logdir=str(tmp_path / "theirs"), file_name="vdlrecords.tokens.log") as writer:
        for (name, step, walltime), value in points_of(1, 2):
            writer.add_scalar(name, value, step, walltime)
    theirs = record_file(tmp_path / "theirs").read_bytes()
    # The record at the beginning has the time of its writing.
    (length,) = struct.unpack("<Q", ours[:8])
    assert ours[8 + length :] == theirs[8 + length :]
    assert ours[:8] == theirs[:8]


def test_what_has_become_unknown_is_nan_in_the_curve_and_null_in_the_sidecar(tmp_path: Path) -> None:
    unknown = Snapshot("step", 1, 1, 1, 1000, {"tokens/valid": math.nan}, {"tokens/computed": 10_251_184_259})
    VisualDLSink(tmp_path, TAGS).write([unknown])
    (((name, step, time), value),) = shown(tmp_path)
    assert (name, step, time) == ("tokens/valid", 1, 1000)
    assert math.isnan(value)
    assert sidecar(tmp_path) == {
        "tags": TAGS,
        "seq": 1,
        "step": 1,
        "position": 1,
        "timestamp_ms": 1000,
        "counts": {"tokens/computed": 10_251_184_259},
        "metrics": {"tokens/valid": None},
    }


def test_a_file_cut_off_at_any_byte_is_continued_with_every_point_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notices.set_up(silent=False)
    whole = written(tmp_path / "whole", 1, 2).read_bytes()
    for cut in range(len(whole)):
        logdir = tmp_path / str(cut)
        (logdir / "tokens").mkdir(parents=True)
        (logdir / "tokens" / "vdlrecords.tokens.log").write_bytes(whole[:cut])
        catch_up(logdir, 1, 2, 3)
        assert shown(logdir) == sorted(points_of(1, 2, 3)), cut
        assert list((logdir / "tokens").glob("*.damaged")) == []
    assert capsys.readouterr().err == ""


def test_so_is_one_with_a_long_name(tmp_path: Path) -> None:
    long = Snapshot("step", 2, 2, 2, 2000, {f"tokens/source/{'x' * 150}": 7.0}, {})
    path = written(tmp_path, 1)
    before = path.stat().st_size
    sink = VisualDLSink(tmp_path, TAGS)
    sink.write([long])
    sink.close("FINISHED")
    whole = path.read_bytes()
    for cut in range(before, len(whole)):
        path.write_bytes(whole[:cut])
        catch_up(tmp_path, 1, 3)
        assert shown(tmp_path) == sorted(points_of(1, 3)), cut
        assert list(path.parent.glob("*.damaged")) == []


@pytest.mark.parametrize(
    "foreign",
    [
        b"Traceback (most recent call last):\n",
        bytes(64),
        struct.pack("<Q", 4) + b"\xff\xff\xff\xff",
        struct.pack("<Q", 40) + b"not one of our records",
        struct.pack("<Q", 500) + b"nor half of one",
        struct.pack("<Q", 4) + b"\n\x02\x08\x05",  # a value without a value, at which VisualDL fails
        struct.pack("<Q", 1 << 62) + b"more than any disk",
        struct.pack("<Q", 1) + b"\n",
    ],
)
def test_foreign_bytes_are_put_aside_with_one_notice(
    foreign: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notices.set_up(silent=False)
    logdir = tmp_path / "vdl"
    path = written(logdir, 1)
    intact = path.read_bytes()
    behind = written(tmp_path / "other", 2).read_bytes()
    path.write_bytes(intact + foreign + behind)
    catch_up(logdir, 1, 2, 3)
    assert shown(logdir) == sorted(points_of(1, 2, 3))
    assert (logdir / "tokens" / "tokens.1.damaged").read_bytes() == foreign + behind
    # Damaged a second time: what was put aside before stays as it is.
    with path.open("ab") as file:
        file.write(foreign + behind)
    catch_up(logdir, 3, 4)
    assert shown(logdir) == sorted(points_of(1, 2, 3, 4))
    kept = [file.read_bytes() for file in sorted((logdir / "tokens").glob("*.damaged"))]
    assert kept == 2 * [foreign + behind]
    (notice,) = capsys.readouterr().err.splitlines()
    assert f"damaged after byte {len(intact)}: the rest is now in tokens.1.damaged" in notice


def test_a_full_disk_raises_at_any_byte_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    before = written(tmp_path / "before", 1).stat().st_size
    after = written(tmp_path / "after", 1, 2).stat().st_size
    sidecar_bytes = (tmp_path / "after" / "tokens" / "mlflow_tokens.json").stat().st_size
    assert sidecar_bytes > after  # so that room for the records is none for the sidecar
    for size in range(before, sidecar_bytes, 7):
        logdir = tmp_path / str(size)
        path = written(logdir, 1)
        sink = VisualDLSink(logdir, TAGS)
        with no_file_beyond(size):
            for _ in range(2):
                with pytest.raises(OSError, match="File too large"):
                    sink.write([snapshot(2)], skip=sink.stored())
        assert path.stat().st_size == (after if size >= after else before)
        assert sidecar(logdir)["seq"] == 1
        assert [file.name for file in path.parent.iterdir() if file.suffix == ".partial"] == []
        sink.write([snapshot(2)], skip=sink.stored())
        sink.close("FINISHED")
        assert shown(logdir) == sorted(points_of(1, 2))
        assert sidecar(logdir)["seq"] == 2


def test_a_full_disk_at_the_first_write(tmp_path: Path) -> None:
    sink = VisualDLSink(tmp_path, TAGS)
    with no_file_beyond(20), pytest.raises(OSError, match="File too large"):
        sink.write([snapshot(1)])
    sink.write([snapshot(1)], skip=sink.stored())
    assert shown(tmp_path) == sorted(points_of(1))


def test_what_cannot_be_put_aside_stays_where_it_is(tmp_path: Path) -> None:
    path = written(tmp_path, 1)
    damaged = path.read_bytes() + 100 * b"foreign "
    path.write_bytes(damaged)
    sink = VisualDLSink(tmp_path, TAGS)
    with no_file_beyond(100), pytest.raises(OSError, match="File too large"):
        sink.write([snapshot(2)])
    assert path.read_bytes() == damaged
    assert list(path.parent.glob("*.damaged")) == []
    sink.write([snapshot(2)])
    assert shown(tmp_path) == sorted(points_of(1, 2))


@pytest.mark.parametrize("lines", [1, 40])
def test_every_point_reported_as_written_survives_a_kill(
    lines: int, tmp_path: Path, child: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = child(
        "for seq in range(1, 1_000_000):\n    sink.write([snapshot(seq)])\n    print(seq, flush=True)\n"
    )
    assert process.stdout is not None
    reported = [int(process.stdout.readline()) for _ in range(lines)]
    process.kill()
    # The last line may be cut off.
    reported += [int(line) for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    process.wait()
    assert reported == list(range(1, reported[-1] + 1))
    stored = VisualDLSink(tmp_path, TAGS).stored()
    assert stored >= {point for point, _ in points_of(*reported)}
    # The next process goes on from there.
    seqs = range(1, reported[-1] + 3)
    catch_up(tmp_path, *seqs)
    assert shown(tmp_path) == sorted(points_of(*seqs))
    assert sidecar(tmp_path)["seq"] == seqs[-1]


def test_a_second_job_is_refused_until_the_first_is_gone(
    tmp_path: Path, child: Callable[[str], subprocess.Popen[str]]
) -> None:
    # The first one is killed and leaves a forked worker, which must not keep the directory.
    process = child(
        "sink.write([snapshot(1)])\n"
        "if os.fork() == 0:\n"
        "    print('forked', flush=True)\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
        "signal.pause()\n"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "forked\n"
    sink = VisualDLSink(tmp_path, TAGS)
    for _ in range(2):
        with pytest.raises(
            OSError, match=r"another job writes its VisualDL logs to this directory: .*tokens"
        ):
            sink.write([snapshot(2)])
    assert shown(tmp_path) == sorted(points_of(1))
    process.kill()
    process.wait()
    sink.write([snapshot(2)])
    assert shown(tmp_path) == sorted(points_of(1, 2))


def test_two_sinks_of_one_process_take_turns(tmp_path: Path) -> None:
    first, second = VisualDLSink(tmp_path, TAGS), VisualDLSink(tmp_path, TAGS)
    first.write([snapshot(1)])
    with pytest.raises(OSError, match="another job"):
        second.write([snapshot(2)])
    first.close("FINISHED")
    second.write([snapshot(2)])
    second.close("FINISHED")
    first.write([snapshot(3)])
    assert shown(tmp_path) == sorted(points_of(1, 2, 3))


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    sink = VisualDLSink(tmp_path, TAGS)
    sink.write([snapshot(1)])
    shutil.rmtree(tmp_path / "tokens")
    sink.write([snapshot(2)])
    assert shown(tmp_path) == sorted(points_of(2))
    assert sidecar(tmp_path)["seq"] == 2
    with pytest.raises(OSError, match="another job"):
        VisualDLSink(tmp_path, TAGS).write([snapshot(3)])


def test_no_file_stays_open_after_close(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    for seq in range(1, 20):
        written(tmp_path, seq)
    assert len(os.listdir("/proc/self/fd")) == len(before)


class TestSidecar:
    def test_it_does_not_go_back_when_a_backlog_comes_late(self, tmp_path: Path) -> None:
        sink = VisualDLSink(tmp_path, TAGS)
        sink.write([snapshot(5), snapshot(4)])
        assert sidecar(tmp_path)["seq"] == 5
        # Before the clock was put back it was later.
        sink.write([snapshot(1), snapshot(2, timestamp_ms=1_800_000_000_000)])
        assert sidecar(tmp_path)["seq"] == 5
        sink.write([snapshot(6, timestamp_ms=1_600_000_000_000)])
        assert sidecar(tmp_path)["seq"] == 6

    def test_nor_in_a_later_process(self, tmp_path: Path) -> None:
        written(tmp_path, 1, 5)
        catch_up(tmp_path, 2, 3, 4)
        assert sidecar(tmp_path)["seq"] == 5
        assert shown(tmp_path) == sorted(points_of(1, 2, 3, 4, 5))

    def test_another_run_in_the_directory_has_its_own(self, tmp_path: Path) -> None:
        written(tmp_path, 500)
        sink = VisualDLSink(tmp_path, {})
        sink.write([snapshot(1, timestamp_ms=1_700_000_500_001)])
        assert sidecar(tmp_path)["seq"] == 1
        assert sidecar(tmp_path)["tags"] == {}

    @pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"seq": null, "timestamp_ms": 1}', "\x00"])
    def test_a_damaged_one_is_replaced(self, content: str, tmp_path: Path) -> None:
        written(tmp_path, 5)
        (tmp_path / "tokens" / "mlflow_tokens.json").write_text(content)
        catch_up(tmp_path, 5)
        assert sidecar(tmp_path)["counts"] == {"tokens/computed": 20480}
