"""The token report as VisualDL shows it: a histogram of row lengths and a heat map as an image."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from mlflow_tokens.report import HeatMap, TokenReport, heat_color

HISTOGRAM, HEAT_MAP = "tokens/sequence_length", "tokens/valid_ratio_by_stage"
BINS = 30

#: Pixels of a cell, and of the space for the names beside and below the cells.
_CELL, _NAMES, _STEPS = (26, 18), 150, 16
#: Rows that an image has at most.
_ROWS = 40


def encode_report(report: TokenReport, step: int, timestamp_ms: int) -> bytes:
    """Records for VisualDL's Histogram and Image pages; none of what the report does not have."""
    from visualdl.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for record in _records(report, step, timestamp_ms):
        writer.write(record.SerializeToString())
    return buffer.getvalue()


def _records(report: TokenReport, step: int, timestamp_ms: int) -> Iterator[Any]:
    from visualdl.component.base_component import histogram
    from visualdl.proto.record_pb2 import Record

    if report.histogram:
        edges, rows = bins(report.histogram)
        yield histogram(HISTOGRAM, hist=rows, bin_edges=edges, step=step, walltime=timestamp_ms)
    if report.heat_map is not None:
        # VisualDL's own encoder swaps red and blue where OpenCV is installed.
        image = Record.Image(encoded_image_string=draw(report.heat_map))
        yield Record(values=[Record.Value(id=step, tag=HEAT_MAP, timestamp=timestamp_ms, image=image)])


def bins(histogram: tuple[tuple[int, int], ...]) -> tuple[list[float], list[float]]:
    """Edges and rows of at most `BINS` bins of equal width, from the smallest length of each bucket."""
    width = max(1, -(-(histogram[-1][0] + 1) // BINS))
    count = histogram[-1][0] // width + 1
    rows = [0.0] * count
    for length, number in histogram:
        rows[length // width] += number
    return [float(width * edge) for edge in range(count + 1)], rows


def draw(heat_map: HeatMap) -> bytes:
    """A PNG with a row for each source or row length and a column for each stage."""
    from PIL import Image, ImageDraw

    names = list(heat_map.rows)[:_ROWS]
    wide, high = _CELL
    size = (_NAMES + wide * len(heat_map.until), high * len(names) + _STEPS)
    image = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(image)
    for row, name in enumerate(names):
        # Pillow's own font has Latin letters alone.
        text = name.encode("ascii", "replace").decode()[:24]
        pen.text((4, row * high + 3), text, fill="black")
        for column, ratio in enumerate(heat_map.rows[name]):
            if ratio is None:
                continue
            left, top = _NAMES + column * wide, row * high
            pen.rectangle((left, top, left + wide - 1, top + high - 1), fill=heat_color(ratio))
            pen.text((left + 4, top + 3), f"{100 * ratio:.0f}", fill="black")
    below = high * len(names) + 2
    pen.text((4, below), "valid / computed, % up to step", fill="black")
    pen.text((size[0] - 40, below), f"{heat_map.until[-1]}", fill="black")
    buffer = io.BytesIO()
    image.quantize(64).save(buffer, format="png", optimize=True)
    return buffer.getvalue()
