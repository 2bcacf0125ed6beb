"""The page under MLflow's own users and permissions: `mlflow server --app-name tokens-basic-auth`.

Everything of `mlflow.server.auth` that is not its public interface stands in this file:

- `create_app`: asks for a user before every route of a Flask app;
- `BEFORE_REQUEST_VALIDATORS`: what decides about a path; a path that nobody decides about is forbidden;
- `authenticate_request`: who asks;
- `filter_experiment_ids`: which experiments the user of this request may read. Outside a request, or
  before there are users, it lets everything through;
- `bootstrap_admin_user`, `get_flask_server_secret_key`, `_MLFLOW_AUTH_ADMIN_BOOTSTRAPPED`: what `mlflow
  server` does itself, before it starts workers, for an app that is called "basic-auth".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from flask import has_request_context
from mlflow.environment_variables import _MLFLOW_AUTH_ADMIN_BOOTSTRAPPED
from mlflow.server import auth

from mlflow_tokens.comparison.permitted import PermittedReader
from mlflow_tokens.comparison.reader import ReadError
from mlflow_tokens.server import PAGE, install, mlflow_reader, static_prefix

# This module is loaded by `mlflow server` before it starts workers, which inherit the environment: a
# missing key or password ends the command, instead of workers that are started again and again.
if not _MLFLOW_AUTH_ADMIN_BOOTSTRAPPED.get():
    auth.get_flask_server_secret_key()
    auth.bootstrap_admin_user()
    os.environ[_MLFLOW_AUTH_ADMIN_BOOTSTRAPPED.name] = "true"


def create_app() -> Any:
    """MLflow's server with basic auth and the page: the entry point `tokens-basic-auth` of `mlflow.app`."""
    from mlflow.server import app

    install(app, _reader)
    base = static_prefix() + PAGE
    if not isinstance(auth.BEFORE_REQUEST_VALIDATORS, _Validators):
        auth.BEFORE_REQUEST_VALIDATORS = _Validators(auth.BEFORE_REQUEST_VALIDATORS, base)
    return auth.create_app(app)


class _Validators(dict[tuple[str, str], Callable[[], bool]]):
    """Lets everybody who has logged in have all of the page: its scripts, callbacks and API, by prefix.

    What they are shown is decided for each experiment, by the reader.
    """

    def __init__(self, validators: Mapping[tuple[str, str], Callable[[], bool]], base: str) -> None:
        super().__init__(validators)
        self._base = base

    def get(self, key: Any, default: Any = None) -> Any:
        path, _method = key
        if path.startswith(self._base) or f"{path}/" == self._base:
            return _is_logged_in
        return super().get(key, default)


def _is_logged_in() -> bool:
    return bool(_user())


def _user() -> str | None:
    """Who asks; None outside a request, and where nobody has logged in."""
    if not has_request_context():
        return None
    # Either an authorization or the answer that asks for one.
    return getattr(auth.authenticate_request(), "username", None)


def _reader() -> PermittedReader:
    return PermittedReader(mlflow_reader(), _may_read)


def _may_read(experiment_ids: list[str]) -> list[str]:
    # Without a user MLflow's filter would let everything through.
    if not _user() or not auth.auth_config:
        raise ReadError("nobody is logged in")
    allowed: list[str] = auth.filter_experiment_ids(list(experiment_ids))
    return allowed
