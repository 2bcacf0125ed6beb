"""The page next to an MLflow server that one may not change: `mlflow-tokens ui`."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from flask import Flask, Response, redirect, request
from werkzeug.serving import BaseWSGIServer, make_server

from mlflow_tokens.comparison.mlflow_reader import MlflowReader
from mlflow_tokens.views.mount import mount

PAGE = "/tokens/"
_RUN = "/#/experiments/{experiment_id}/runs/{run_id}"


def create_standalone(tracking_uri: str | None, mlflow_ui: str | None, hosts: frozenset[str]) -> Flask:
    """The page on an app of its own, over whatever `MlflowClient` can reach, with the caller's credentials.

    Args:
        tracking_uri: the store; None: MLflow's own. mlflow_ui: where the runs' names lead; by default the
            tracking server. hosts: names under which the page answers; a site that a browser has
            been led to (DNS rebinding) cannot read the page under its own name.
    """
    app = Flask("mlflow_tokens.standalone", static_folder=None)
    ui = (mlflow_ui or (tracking_uri if _is_server(tracking_uri) else None) or "").rstrip("/")
    mount(app, PAGE, lambda: MlflowReader(tracking_uri), ui + _RUN if ui else "")

    def check_host() -> Response | None:
        if urlsplit(f"//{request.host}").hostname in hosts:
            return None
        return Response("This page does not answer under this name: see --allowed-hosts.", 403)

    app.before_request(check_host)
    app.add_url_rule("/", "index", lambda: redirect(PAGE))  # type: ignore[arg-type, return-value]
    return app


def create_server(app: Flask, host: str, port: int) -> BaseWSGIServer:
    """A server for the people at one machine; `serve_forever` answers until it is interrupted.

    Raises:
        OSError: the address cannot be used.
    """
    with socket.create_server((host, port), family=_family(host)) as listening:
        # Given an address that is taken, Werkzeug would print and exit by itself.
        return make_server(host, port, app, threaded=True, fd=os.dup(listening.fileno()))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _is_server(uri: str | None) -> bool:
    return urlsplit(uri or "").scheme in ("http", "https")
