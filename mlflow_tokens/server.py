"""The page inside MLflow's server: `mlflow server --app-name tokens`, or `install()` in one's own app.

Everything of MLflow's that is not its public interface stands in this file, because it may change:

- `mlflow.server.app`: the Flask app of the MLflow server, to which the page is added;
- `BACKEND_STORE_URI_ENV_VAR`: where `mlflow server` tells its workers which store it serves;
- `STATIC_PREFIX_ENV_VAR`: the path in front of every route (`--static-prefix`);
- `_MLFLOW_SGI_NAME`: the kind of server that asks for the app; only uvicorn takes an ASGI app;
- `create_fastapi_app`: the ASGI app of the MLflow server around a Flask app.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from flask import Flask

from mlflow_tokens.comparison.mlflow_reader import MlflowReader
from mlflow_tokens.comparison.reader import Reader
from mlflow_tokens.views.mount import mount

PAGE = "/tokens/"
#: MLflow's own page of a run, behind the path of its user interface.
RUN_LINK = "/#/experiments/{experiment_id}/runs/{run_id}"

_INSTALLED = "mlflow_tokens"


def create_app() -> Any:
    """The MLflow server's app with the page at /tokens/: the entry point `tokens` of `mlflow.app`."""
    from mlflow.environment_variables import _MLFLOW_SGI_NAME
    from mlflow.server import app

    install(app)
    if _MLFLOW_SGI_NAME.get() == "uvicorn":
        from mlflow.server.fastapi_app import create_fastapi_app

        return create_fastapi_app(app)
    return app


def install(flask_app: Flask, reader_factory: Callable[[], Reader] | None = None) -> None:
    """Add the page to MLflow's Flask app; a second call changes nothing.

    Args:
        reader_factory: called within each request to the page's API; by default everybody who reaches the
            server sees every run.
    """
    if _INSTALLED in flask_app.extensions:
        return
    prefix = static_prefix()
    mount(flask_app, prefix + PAGE, reader_factory or mlflow_reader, prefix + RUN_LINK)
    flask_app.extensions[_INSTALLED] = prefix + PAGE


def mlflow_reader() -> MlflowReader:
    """Reads the store that this server serves; without `mlflow server`, the default tracking URI."""
    from mlflow.server.constants import BACKEND_STORE_URI_ENV_VAR

    return MlflowReader(os.environ.get(BACKEND_STORE_URI_ENV_VAR))


def static_prefix() -> str:
    from mlflow.server.handlers import STATIC_PREFIX_ENV_VAR

    return os.environ.get(STATIC_PREFIX_ENV_VAR, "").rstrip("/")
