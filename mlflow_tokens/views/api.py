"""The JSON API: the only way by which the page, or anybody's script, gets at the numbers.

Under /tokens/api/v1/, for GET:

    experiments     {"experiments": [{"experiment_id", "name"}]}
    runs            ?experiment=NAME (repeatable; all without) &by=effective|valid|trained|computed
                    {"by", "rows": N, "columns": {"rank": [...], "run_id": [...], ...}}
    curves          ?run_id=ID (repeatable, 1 to 100), and
                    &by=...                  cost per million tokens over tokens of that kind
                                             (effective where nothing is said)
                    &metric=A&against=B      any metric against another, joined on equal steps
                    {"metric", "against", "curves": [{"run_id", "x": [...], "y": [...]}]}

Runs that have no such curve are left out of the answer. Unknown numbers are null. An error is
{"error": text} with status 400 (bad question), 404 (no such thing), 502 (the store does not answer).
"""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable
from typing import Any

from flask import Blueprint, Response, request
from werkzeug.exceptions import HTTPException

from mlflow_tokens.comparison.reader import MissingError, Reader, ReadError
from mlflow_tokens.comparison.table import DENOMINATORS, rank
from mlflow_tokens.comparison.thinning import evenly
from mlflow_tokens.views.columns import CURVE_POINTS, joined, json_number, per_million, run_columns

API_PATH = "api/v1"
MAX_CURVES = 100

#: Points read per metric before the join: thinned apart, two metrics would share too few steps.
_READ_POINTS = 100_000
#: Answers shorter than this many bytes are not worth compressing.
_GZIP_FROM = 1000

_logger = logging.getLogger(__name__)


class BadQuestionError(Exception):
    """The request cannot be answered as it stands. The message says what would be right."""


def experiments_answer(reader: Reader) -> dict[str, Any]:
    """The experiments that the reader may see, by name."""
    return {"experiments": [{"experiment_id": e.experiment_id, "name": e.name} for e in reader.experiments()]}


def runs_answer(reader: Reader, experiments: list[str], by: str) -> dict[str, Any]:
    """The ranking by cost per million tokens of the kind `by`, in columns."""
    _check_denominator(by)
    lines = rank(reader.runs(experiments or None), by)
    return {"by": by, "rows": len(lines), "columns": run_columns(lines)}


def curves_answer(
    reader: Reader, run_ids: list[str], by: str | None, metric: str | None, against: str | None
) -> dict[str, Any]:
    """One curve a run: `metric` over `against`, or cost per million tokens over tokens of the kind `by`."""
    if not 1 <= len(run_ids) <= MAX_CURVES:
        raise BadQuestionError(f"{len(run_ids)} runs asked for: give run_id 1 to {MAX_CURVES} times")
    if by is None and metric is None and against is None:
        by = DENOMINATORS[0]
    if by is not None:
        if metric is not None or against is not None:
            raise BadQuestionError("give either by, or metric and against")
        _check_denominator(by)
        metric, against = "cost/total", f"tokens/{by}"
    if metric is None or against is None:
        raise BadQuestionError("metric and against go together, as in metric=loss&against=tokens/effective")
    ids = list(dict.fromkeys(run_ids))
    over = {curve.run_id: curve for curve in reader.curves(ids, metric, _READ_POINTS)}
    below = {curve.run_id: curve for curve in reader.curves(ids, against, _READ_POINTS)}
    curves = []
    for run_id in ids:
        if run_id in over and run_id in below:
            x, y = joined(over[run_id], below[run_id])
            if by is not None:
                x, y = per_million(x, y)
            kept = evenly(len(x), CURVE_POINTS)
            curves.append(
                {"run_id": run_id, "x": [_axis(x[i]) for i in kept], "y": [json_number(y[i]) for i in kept]}
            )
    name = metric if by is None else f"cost per million {by} tokens"
    return {"metric": name, "against": against, "curves": curves}


def api_blueprint(reader_factory: Callable[[], Reader]) -> Blueprint:
    """The API's routes. The factory is called once a request, within it, and gives what its user may read."""

    def experiments() -> Response:
        return _answer(experiments_answer(reader_factory()))

    def runs() -> Response:
        by = request.args.get("by", DENOMINATORS[0])
        return _answer(runs_answer(reader_factory(), request.args.getlist("experiment"), by))

    def curves() -> Response:
        asked = request.args
        ids, by = asked.getlist("run_id"), asked.get("by")
        return _answer(curves_answer(reader_factory(), ids, by, asked.get("metric"), asked.get("against")))

    blueprint = Blueprint("mlflow_tokens_api", __name__)
    blueprint.add_url_rule("/experiments", view_func=experiments)
    blueprint.add_url_rule("/runs", view_func=runs)
    blueprint.add_url_rule("/curves", view_func=curves)
    blueprint.add_url_rule("/", view_func=_nothing)
    blueprint.add_url_rule("/<path:path>", view_func=_nothing)
    blueprint.register_error_handler(BadQuestionError, _bad_question)
    blueprint.register_error_handler(ReadError, _unreadable)
    blueprint.register_error_handler(HTTPException, _refused)
    blueprint.register_error_handler(Exception, _failed)
    return blueprint


def _nothing(path: str = "") -> Response:
    return _error(404, f"no {path!r} here: ask for experiments, runs or curves")


def _bad_question(error: BadQuestionError) -> Response:
    return _error(400, str(error))


def _unreadable(error: ReadError) -> Response:
    if isinstance(error, MissingError):
        return _error(404, str(error))
    # Which store, and how it failed, is for whoever runs the server, not for all who see the page.
    _logger.error("%s: %s", request.path, error)
    return _error(502, "the store of runs does not answer; the server's log says why")


def _refused(error: HTTPException) -> Response:
    return _error(error.code or 500, error.description or error.name)


def _failed(error: Exception) -> Response:
    _logger.error("%s failed", request.full_path, exc_info=error)
    return _error(500, "the server failed to answer; its log says why")


def _check_denominator(by: str) -> None:
    if by not in DENOMINATORS:
        raise BadQuestionError(f"by={by!r} is not one of {', '.join(DENOMINATORS)}")


def _axis(tokens: float) -> float | int | None:
    """A whole number that a double holds exactly stays one: a token count is not rounded."""
    return int(tokens) if tokens.is_integer() and abs(tokens) < 2**53 else json_number(tokens)


def _error(status: int, text: str) -> Response:
    return _answer({"error": text}, status)


def _answer(content: dict[str, Any], status: int = 200) -> Response:
    body = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
    response = Response(body, status, mimetype="application/json")
    if len(body) >= _GZIP_FROM and request.accept_encodings.quality("gzip") > 0:
        response.set_data(gzip.compress(body, compresslevel=6, mtime=0))
        response.headers["Content-Encoding"] = "gzip"
    response.headers["Vary"] = "Accept-Encoding"
    response.headers["Cache-Control"] = "no-store"
    return response
