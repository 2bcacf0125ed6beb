"""Puts the page and its API on a host's Flask app, under one path and one Content-Security-Policy."""

from __future__ import annotations

from collections.abc import Callable

from flask import Flask, Response, request

from mlflow_tokens.comparison.reader import Reader
from mlflow_tokens.views.api import API_PATH, api_blueprint
from mlflow_tokens.views.page import create_page


def mount(flask_app: Flask, base: str, reader_factory: Callable[[], Reader], run_link: str) -> None:
    """Serve the page at `base` and the API below it; nothing else of the host changes.

    Args:
        flask_app: the host's app, which has not answered a request yet.
        base: path of the page, with a slash at both ends, as in "/tokens/".
        reader_factory: called once for every request to the API, within that request.
        run_link: where a run's name leads, with {experiment_id} and {run_id} in it.
    """
    flask_app.register_blueprint(api_blueprint(reader_factory), url_prefix=base + API_PATH)
    page = create_page(base, run_link)
    page.init_app(flask_app)
    # Dash would do this at its first request, and fail those that come at the same time: a browser asks
    # for a dozen scripts at once, and of another worker of the server than the one that sent the page.
    page._setup_server()
    policy = content_security_policy(page.csp_hashes())

    def protect(response: Response) -> Response:
        if request.path.startswith(base):
            response.headers["Content-Security-Policy"] = policy
        return response

    flask_app.after_request(protect)


def content_security_policy(script_hashes: list[str]) -> str:
    """Only scripts of this server, or with one of the hashes, run; nothing is fetched from elsewhere.

    Inline styles are allowed because the grid and the plot write theirs at run time.
    """
    scripts = " ".join(["'self'", *script_hashes])
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {scripts}",
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data: blob:",
            "font-src 'self' data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'self'",
        ]
    )
