"""Reads device memory without holding up the stream that trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from mlflow_tokens.notices import logger

#: Seconds between two looks at whether copies have arrived.
POLL = 0.002


class Offload:
    """Copies tensors of a GPU to pinned memory on a stream of its own, behind an event on the training's.

    `Tensor.numpy()` copies on CUDA's default stream instead, for which kernels of all others wait. Paddle's
    `_copy_to(CUDAPinnedPlace(), False)` puts a callback of the host into the training's stream.

    Where the build has no such stream (before Paddle 3, not CUDA), or it fails once, values are left where
    they are. A thread's first copy is left so, too: it is what tells CUDA the device of a new thread.
    """

    def __init__(self) -> None:
        self._thread = threading.local()
        self._load: Any = None
        self._works = True

    def to_host(self, values: Sequence[Any]) -> Sequence[Any]:
        """The values, those on a GPU copied to the host. Waits for the GPU: not for the training thread."""
        if not self._works or not any(map(_is_on_gpu, values)):
            return values
        if not getattr(self._thread, "known", False):
            self._thread.known = True
            return values
        try:
            return self._copies(values)
        except Exception as error:
            self._works = False
            logger.debug("Device memory is read on the default stream: %r", error)
            return values

    def _copies(self, values: Sequence[Any]) -> list[Any]:
        from paddle.incubate.tensor.manipulation import async_offload, create_async_load

        self._load = self._load or create_async_load()
        copies, tasks = list(values), []
        for number, value in enumerate(values):
            if _is_on_gpu(value):
                copies[number], task = async_offload(value, self._load)
                tasks.append(task)
        while not all(task.is_completed() for task in tasks):
            time.sleep(POLL)
        return copies


def _is_on_gpu(value: Any) -> bool:
    place = getattr(value, "place", None)
    return place is not None and bool(place.is_gpu_place())
