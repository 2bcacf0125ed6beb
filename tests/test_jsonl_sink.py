"""The JSONL sink on a real disk, against lines and points made by hand."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlflow_tokens.sinks.jsonl import JsonlSink
from mlflow_tokens.snapshot import Point, Snapshot

TAGS = {"mlflow_tokens.device_type": "昇腾 910B"}
HEAD = '{"schema":1,"tags":{"mlflow_tokens.device_type":"昇腾 910B"}}\n'


def snapshot(seq: int) -> Snapshot:
    """Two points at step 10 x seq, of a run that has been at 700 before."""
    metrics = {"tokens/computed": 4096.0 * seq, "cost/total": 0.5 * seq}
    counts = {"tokens/computed": 4096 * seq}
    return Snapshot("step", seq, 10 * seq, 10 * seq, 1000 * seq, metrics, counts, high_water=700)


def points_of(*seqs: int) -> list[Point]:
    return [(name, 10 * seq, 1000 * seq) for seq in seqs for name in ("tokens/computed", "cost/total")]


def points_in(path: Path) -> list[Point]:
    """Every point of every line; each line must be whole."""
    head, *lines = path.read_text("utf-8").splitlines(keepends=True)
    assert head == HEAD
    points = []
    for line in lines:
        content: dict[str, Any] = json.loads(line)
        assert line.endswith("}\n")
        points += [(name, content["position"], content["timestamp_ms"]) for name in content["metrics"]]
    return points


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """A full disk: no file of this process may grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


def test_nothing_is_made_before_the_first_snapshot(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "logs" / "tokens.jsonl", TAGS)
    assert sink.stored() == set()
    sink.write([])
    sink.close("FINISHED")
    assert list(tmp_path.iterdir()) == []


def test_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "tokens.jsonl"
    sink = JsonlSink(path, TAGS)
    unknown = {"tokens/valid": math.nan, "cost/total": math.inf, "device/hours": 0.25}
    heartbeat = Snapshot("heartbeat", 2, 10, 10, 2500, unknown, {"tokens/computed": 10_251_184_259})
    sink.write([snapshot(1)])
    sink.write([heartbeat])
    sink.close("FINISHED")
    assert path.read_text("utf-8") == (
        HEAD + '{"kind":"step","seq":1,"step":10,"position":10,"timestamp_ms":1000,'
        '"metrics":{"tokens/computed":4096.0,"cost/total":0.5},"counts":{"tokens/computed":4096}}\n'
        '{"kind":"heartbeat","seq":2,"step":10,"position":10,"timestamp_ms":2500,'
        '"metrics":{"tokens/valid":null,"cost/total":null,"device/hours":0.25},'
        '"counts":{"tokens/computed":10251184259}}\n'
    )
    assert sink.stored() == {
        *points_of(1),
        ("tokens/valid", 10, 2500),
        ("cost/total", 10, 2500),
        ("device/hours", 10, 2500),
    }


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl"
    JsonlSink(path, TAGS).write([snapshot(1), snapshot(2)])
    sink = JsonlSink(path, TAGS)
    sink.write([snapshot(1), snapshot(2)], skip=sink.stored())
    assert points_in(path) == points_of(1, 2)
    sink.write([snapshot(2), snapshot(3)], skip={*sink.stored(), points_of(3)[0]})
    assert points_in(path) == [*points_of(1, 2), points_of(3)[1]]


def test_a_file_cut_off_at_any_byte_is_continued_with_every_point_once(tmp_path: Path) -> None:
    JsonlSink(tmp_path / "whole", TAGS).write([snapshot(1), snapshot(2)])
    whole = (tmp_path / "whole").read_bytes()
    for cut in range(len(whole)):
        path = tmp_path / str(cut)
        path.write_bytes(whole[:cut])
        sink = JsonlSink(path, TAGS)
        sink.write([snapshot(1), snapshot(2), snapshot(3)], skip=sink.stored())
        assert points_in(path) == points_of(1, 2, 3), cut


def test_a_partial_line_longer_than_one_read_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl"
    JsonlSink(path, TAGS).write([snapshot(1)])
    with path.open("ab") as file:
        file.write(b'{"kind":' + 200_000 * b" ")
    JsonlSink(path, TAGS).write([snapshot(2)])
    assert points_in(path) == points_of(1, 2)


def test_what_others_wrote_stays(tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl"
    others = b'\xff\x00\n[1]\n{"metrics": 1}\n"no end of line"'
    path.write_bytes(others)
    sink = JsonlSink(path, TAGS)
    sink.write([snapshot(1)])
    assert path.read_bytes().startswith(others + b'\n{"kind":"step","seq":1,')
    assert sink.stored() == set(points_of(1))


def test_a_full_disk_raises_at_any_byte_and_leaves_no_half_line(tmp_path: Path) -> None:
    JsonlSink(tmp_path / "whole", TAGS).write([snapshot(1), snapshot(2)])
    size = (tmp_path / "whole").stat().st_size
    for room in range(size):
        path = tmp_path / str(room)
        sink = JsonlSink(path, TAGS)
        with no_file_beyond(room), pytest.raises(OSError, match="File too large"):
            sink.write([snapshot(1), snapshot(2)])
        assert path.read_bytes() == b""
        sink.write([snapshot(1), snapshot(2)], skip=sink.stored())
        assert points_in(path) == points_of(1, 2)


def test_a_full_disk_keeps_the_lines_before(tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl"
    sink = JsonlSink(path, TAGS)
    sink.write([snapshot(1)])
    with no_file_beyond(path.stat().st_size + 50), pytest.raises(OSError, match="File too large"):
        sink.write([snapshot(2)])
    assert points_in(path) == points_of(1)
    sink.write([snapshot(2)])
    assert points_in(path) == points_of(1, 2)


def test_a_device_without_space_raises() -> None:
    with pytest.raises(OSError, match="No space left on device"):
        JsonlSink(Path("/dev/full"), TAGS).write([snapshot(1)])


@pytest.mark.parametrize("lines", [1, 200])
def test_every_point_reported_as_written_survives_a_kill(lines: int, tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl"
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.test_jsonl_sink import TAGS, snapshot\n"
        "from mlflow_tokens.sinks.jsonl import JsonlSink\n"
        "sink = JsonlSink(Path(sys.argv[1]), TAGS)\n"
        "for seq in range(1, 1_000_000):\n"
        "    sink.write([snapshot(seq)])\n"
        "    print(seq, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    with process:
        assert process.stdout is not None
        reported = [int(process.stdout.readline()) for _ in range(lines)]
        process.kill()
        # The last line may be cut off.
        rest = process.stdout.read().splitlines(keepends=True)
        reported += [int(line) for line in rest if line.endswith("\n")]
    assert reported == list(range(1, reported[-1] + 1))
    sink = JsonlSink(path, TAGS)
    assert sink.stored() >= set(points_of(*reported))
    seqs = range(1, reported[-1] + 3)
    sink.write([snapshot(seq) for seq in seqs], skip=sink.stored())
    assert points_in(path) == points_of(*seqs)


def test_no_file_is_open_between_writes(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    sink = JsonlSink(tmp_path / "tokens.jsonl", TAGS)
    sink.write([snapshot(1)])
    assert len(os.listdir("/proc/self/fd")) == len(before)
