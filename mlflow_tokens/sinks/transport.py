"""How MLflow asks a server when it asks for us: once, for seconds, and past the launcher's renamed proxies.

By default MLflow asks up to eight times and sleeps in between, 246 s on a server that is away, and waits
120 s for an answer. Our writer has a back-off of its own, and it can be told to hurry. So on our threads,
and on no other, the one function through which all of MLflow's REST calls go is called with other arguments.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from mlflow_tokens.sinks.base import _ours, is_our_thread, mark_our_thread
from mlflow_tokens.sinks.randomness import is_served, leave_the_scripts_random_numbers_alone

#: Seconds for a connection, and then between two parts of an answer, unless $MLFLOW_HTTP_REQUEST_TIMEOUT
#: says otherwise.
TIMEOUT = 10.0

_FUNCTION = "_get_http_response_with_retries"
_ARGUMENTS = {"url", "max_retries", "raise_on_status", "respect_retry_after_header", "kwargs"}
_installing = threading.Lock()


@contextmanager
def our_work(tracking_uri: str) -> Iterator[None]:
    """What MLflow does within, on this thread, is for us, whoever's thread it is otherwise.

    It draws none of the script's random numbers, and asks a server once and for seconds.
    """
    always_ours = is_our_thread()
    mark_our_thread()
    try:
        leave_the_scripts_random_numbers_alone(tracking_uri)
        if is_served(tracking_uri):
            ask_once_on_our_threads()
        yield
    finally:
        _ours.writing = always_ours


def ask_once_on_our_threads() -> bool:
    """Whether MLflow's requests on our threads are short from now on.

    They are not where a version of MLflow does them in another way: then they are as that version does them.
    """
    from mlflow.utils import rest_utils

    with _installing:
        ask = getattr(rest_utils, _FUNCTION, None)
        if ask is None or not _ARGUMENTS.issubset(inspect.signature(ask).parameters):
            return False
        if not hasattr(ask, "for_mlflow_tokens"):
            setattr(rest_utils, _FUNCTION, _asking_once(ask))
    return True


def _asking_once(ask: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(ask)

    @functools.wraps(ask)
    def ask_once(*args: Any, **kwargs: Any) -> Any:
        if not is_our_thread():
            return ask(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        call.arguments.update(
            max_retries=0,
            # An answer of 429 or 500 is then returned: what it says is worth more than "too many retries".
            raise_on_status=False,
            respect_retry_after_header=False,
        )
        options = call.arguments.setdefault("kwargs", {})
        options["timeout"] = _seconds(options.get("timeout"))
        if "proxies" not in options and (proxies := renamed_proxies(call.arguments["url"])):
            options["proxies"] = proxies
        return ask(*call.args, **call.kwargs)

    ask_once.for_mlflow_tokens = True  # type: ignore[attr-defined]
    return ask_once


def _seconds(given: Any) -> Any:
    if "MLFLOW_HTTP_REQUEST_TIMEOUT" in os.environ or (isinstance(given, int | float) and given < TIMEOUT):
        return given
    return TIMEOUT


def renamed_proxies(url: str) -> dict[str, str]:
    """The proxy for `url` that `paddle.distributed.launch` has taken away, by scheme; empty if it took none.

    The launcher renames `http_proxy` to `http_proxy_original`, for the sake of NCCL, and workers that need
    the proxy to reach MLflow no longer do. A proxy that is still set, such as `HTTP_PROXY`, goes first.
    """
    from requests.utils import should_bypass_proxies

    scheme = urlsplit(url).scheme.lower()
    proxy = os.environ.get(f"{scheme}_proxy_original")
    if not proxy or scheme in getproxies() or should_bypass_proxies(url, no_proxy=None):
        return {}
    return {scheme: proxy}
