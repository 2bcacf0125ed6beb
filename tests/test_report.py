"""The token report: stages and heat map by hand, in MLflow's artifacts, in VisualDL, and from `sync`."""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path

import mlflow
import numpy as np
import pytest
from PIL import Image

import mlflow_tokens
from mlflow_tokens import cli
from mlflow_tokens.account import account_of
from mlflow_tokens.lengths import Lengths
from mlflow_tokens.profile import STAGES, STRETCHES, Profile
from mlflow_tokens.records import Record
from mlflow_tokens.report import TokenReport, heat_color, report_of
from mlflow_tokens.sinks.visualdl_report import bins
from tests.conftest import Stored
from tests.journals import quantities, segment

PAD = 9


def profile_of(records: list[Record]) -> Profile:
    profile = Profile()
    for record in records:
        profile.apply(record)
    return profile


def fed(step: int, name: str = "a", **sources: tuple[int, int]) -> Record:
    """Quantities with (computed, valid) tokens by source since the segment began."""
    by_source = {key: {"computed": c, "valid": v} for key, (c, v) in sources.items()}
    return quantities(name, step=step, position=step, train=1.0, computed=1, valid=1, by_source=by_source)


def test_valid_ratio_by_source_and_stage() -> None:
    """Twenty stages of five steps; wiki has no padding in the first half, and half of it is in the second."""
    records: list[Record] = [segment()]
    wiki, code = (0, 0), (0, 0)
    for step in range(10, 101, 10):
        wiki = (wiki[0] + 100, wiki[1] + (100 if step <= 50 else 50))
        code = (code[0] + 40, code[1] + 30) if step > 50 else code
        records.append(fed(step, wiki=wiki, **({"code": code} if step > 50 else {})))
    heat_map = report_of(account_of(records), profile_of(records)).heat_map
    assert heat_map is not None
    assert heat_map.by == "source"
    assert heat_map.until == (10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
    assert heat_map.rows == {"code": (None,) * 5 + (0.75,) * 5, "wiki": (1.0,) * 5 + (0.5,) * 5}


def test_a_restart_begins_its_counts_anew() -> None:
    records = [segment(), fed(10, wiki=(100, 100)), segment("b"), fed(20, "b", wiki=(50, 10))]
    heat_map = report_of(account_of(records), profile_of(records)).heat_map
    assert heat_map is not None
    assert heat_map.rows == {"wiki": (1.0, 0.2)}


def test_ten_thousand_snapshots_are_kept_in_bounded_stretches_and_lose_nothing() -> None:
    profile = profile_of([segment(), *(fed(step, wiki=(2 * step, step)) for step in range(1, 10_001))])
    stages = profile.stages()
    assert len(stages) == STAGES
    assert sum(stage.by_source["wiki"][0] for stage in stages) == 20_000
    assert all(stage.by_source["wiki"][0] == 2 * stage.by_source["wiki"][1] for stage in stages)
    assert len(profile._stretches) <= STRETCHES
    assert [stage.step for stage in stages] == pytest.approx(range(500, 10_001, 500), abs=128)


def test_without_sources_the_rows_are_those_of_length() -> None:
    first = Lengths({3: (2, 16, 6), 8: (1, 8, 8)}, 8, 1)
    second = Lengths({3: (4, 32, 12), 8: (1, 8, 8)}, 8, 1)
    records: list[Record] = [
        segment(),
        quantities(step=1, train=1.0, computed=24, valid=14, lengths=first),
        quantities(seq=2, kind="final", step=2, train=2.0, computed=40, valid=20, lengths=second),
    ]
    report = report_of(account_of(records), profile_of(records))
    assert report.heat_map is not None
    assert report.heat_map.rows == {"2-3": (6 / 16, 6 / 16), "8-15": (1.0, None)}
    assert report.histogram == ((3, 4), (8, 1))
    assert (report.mean_length, report.widest, report.full_row_ratio) == (4.0, 8, 0.2)
    assert report.padding_ratio == 0.5


def test_unknown_valid_tokens_leave_the_lengths_out() -> None:
    records = [
        segment(),
        quantities(kind="final", train=1.0, computed=24, lengths=Lengths({3: (2, 16, 6)}, 8)),
    ]
    report = report_of(account_of(records), profile_of(records))
    assert (report.valid, report.mean_length, report.histogram, report.padding_ratio) == (
        None,
        None,
        (),
        None,
    )


def test_hostile_names_are_text_in_the_page() -> None:
    name = '<img src=x onerror="alert(1)">'
    records = [segment(), fed(10, **{name: (100, 50)})]
    page = report_of(account_of(records), profile_of(records)).to_html()
    assert "<img" not in page
    assert "&lt;img src=x" in page
    assert "http" not in page


def test_colours_are_light_enough_for_dark_text() -> None:
    assert heat_color(0.0) == (245, 158, 66)
    assert heat_color(0.5) == (255, 255, 255)
    assert heat_color(1.0) == (120, 170, 255)
    assert heat_color(2.0) == heat_color(1.0)


def test_bins_of_equal_width_hold_all_rows() -> None:
    assert bins(((0, 1), (5, 2), (9, 3))) == (
        [float(edge) for edge in range(11)],
        [1, 0, 0, 0, 0, 2, 0, 0, 0, 3],
    )
    edges, rows = bins(((10, 1), (299, 2), (300, 4)))
    assert (len(edges), edges[1], edges[-1], sum(rows), rows[-1]) == (29, 11.0, 308.0, 7, 6)


def train(tracker: mlflow_tokens.Tracker) -> None:
    for lengths in ([3, 5], [8, 2], [1, 1]):
        rows = [[1] * length + [PAD] * (8 - length) for length in lengths]
        tracker.count({"input_ids": np.array(rows)}, source=["web", "code"])
        tracker.step()


def saved(stored: Stored) -> dict[str, object]:
    run = stored.only_run().info.run_id
    report: dict[str, object] = json.loads(
        mlflow.artifacts.load_text(f"runs:/{run}/mlflow_tokens/tokens.json")
    )
    page = mlflow.artifacts.load_text(f"runs:/{run}/mlflow_tokens/tokens.html")
    assert page.startswith("<!doctype html>")
    return report


SOURCES = {"code": {"computed": 24, "valid": 8}, "web": {"computed": 24, "valid": 12}}
HISTOGRAM = [[1, 2], [2, 1], [3, 1], [5, 1], [8, 1]]


def test_mlflow_has_the_report_among_the_runs_artifacts(stored: Stored) -> None:
    tracker = mlflow_tokens.Tracker(pad_token_id=PAD)
    train(tracker)
    tracker.close()
    report = saved(stored)
    assert (report["sources"], report["histogram"]) == (SOURCES, HISTOGRAM)


def test_sync_brings_the_report_of_a_job_whose_server_was_away(stored: Stored, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        mlflow.set_tracking_uri(f"http://127.0.0.1:{taken.getsockname()[1]}")
    tracker = mlflow_tokens.Tracker(pad_token_id=PAD, journal_dir=tmp_path / "kept")
    train(tracker)
    tracker.close()
    mlflow.set_tracking_uri(stored.uri)
    assert cli.main(["sync", str(tmp_path / "kept"), "--tracking-uri", stored.uri]) == 0
    report = saved(stored)
    assert (report["sources"], report["histogram"]) == (SOURCES, HISTOGRAM)


def test_visualdl_shows_the_histogram_and_the_heat_map(stored: Stored, tmp_path: Path) -> None:
    from visualdl import LogReader

    tracker = mlflow_tokens.Tracker(pad_token_id=PAD, visualdl=tmp_path / "logs")
    train(tracker)
    tracker.close()
    (path,) = (tmp_path / "logs" / "tokens").glob("*vdlrecords*")
    reader = LogReader(file_path=str(path))
    (histogram,) = reader.get_data("histogram", "tokens/sequence_length")
    assert list(histogram.histogram.hist) == [0, 2, 1, 1, 0, 1, 0, 0, 1]
    assert list(histogram.histogram.bin_edges) == list(range(10))
    (picture,) = reader.get_data("image", "tokens/valid_ratio_by_stage")
    image = Image.open(io.BytesIO(picture.image.encoded_image_string)).convert("RGB")
    # Two sources and one snapshot, at the end: code 8 of 24, web 12 of 24.
    assert image.size == (150 + 26, 2 * 18 + 16)
    assert image.getpixel((174, 1)) == pytest.approx(heat_color(8 / 24), abs=8)
    assert image.getpixel((174, 19)) == pytest.approx(heat_color(12 / 24), abs=8)


def test_a_store_without_a_place_for_artifacts_costs_a_line(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    experiment = stored.client.create_experiment("blocked", artifact_location=str(blocked / "artifacts"))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", experiment)
    tracker = mlflow_tokens.Tracker(pad_token_id=PAD)
    train(tracker)
    tracker.close()
    assert stored.only_run().info.status == "FINISHED"
    assert stored.metrics()["tokens/valid"] == 20
    assert capsys.readouterr().err.count("The run's report could not be kept") == 1


def test_a_report_of_nothing_is_a_page_all_the_same() -> None:
    empty = TokenReport(*[None] * 12, (), {}, None)
    assert "<h1>" in empty.to_html()
    assert json.loads(empty.to_json())["computed"] is None
