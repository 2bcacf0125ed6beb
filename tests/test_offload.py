"""Device memory is read on a stream of its own. No GPU here: fakes stand for Paddle's tensors and streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle.incubate.tensor import manipulation

from mlflow_tokens.clock import PhaseClock
from mlflow_tokens.counting import BatchCounts
from mlflow_tokens.meter import Meter
from mlflow_tokens.paddle.offload import Offload


class FakeGpuPlace:
    def is_gpu_place(self) -> bool:
        return True


class FakeGpuTensor:
    """Counts how often it is read where it is."""

    place = FakeGpuPlace()

    def __init__(self, value: int) -> None:
        self.value, self.reads = value, 0

    def __int__(self) -> int:
        self.reads += 1
        return self.value

    def __add__(self, other: Any) -> FakeGpuTensor:
        return FakeGpuTensor(self.value + (other.value if isinstance(other, FakeGpuTensor) else other))

    __radd__ = __add__


class FakePinnedTensor:
    """Holds rubbish until the copy has arrived."""

    def __init__(self) -> None:
        self.value = -(10**9)

    def __int__(self) -> int:
        return self.value


class FakeAsyncLoad:
    """Copies arrive when they have been asked about three times."""

    def __init__(self) -> None:
        self.copied: list[FakeGpuTensor] = []

    def offload(self, tensor: FakeGpuTensor) -> tuple[FakePinnedTensor, Any]:
        self.copied.append(tensor)
        pinned = FakePinnedTensor()
        return pinned, FakeTask(lambda: setattr(pinned, "value", tensor.value))


class FakeTask:
    def __init__(self, arrive: Callable[[], None]) -> None:
        self._arrive, self._asked = arrive, 0

    def is_completed(self) -> bool:
        self._asked += 1
        if self._asked >= 3:
            self._arrive()
        return self._asked >= 3


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> FakeAsyncLoad:
    load = FakeAsyncLoad()
    monkeypatch.setattr(manipulation, "create_async_load", lambda: load)
    monkeypatch.setattr(manipulation, "async_offload", lambda tensor, made: made.offload(tensor))
    return load


def test_what_is_on_the_gpu_is_copied_and_waited_for(stream: FakeAsyncLoad) -> None:
    offload = Offload()
    tensors = [FakeGpuTensor(7), None, 3, FakeGpuTensor(11), paddle.to_tensor(5)]
    # A new thread's first reading tells CUDA its device.
    assert list(offload.to_host(tensors)) == tensors
    copies = offload.to_host(tensors)
    assert [None if copy is None else int(copy) for copy in copies] == [7, None, 3, 11, 5]
    assert stream.copied == [tensors[0], tensors[3]]
    assert [tensor.reads for tensor in stream.copied] == [0, 0]


def test_every_thread_is_told_its_device(stream: FakeAsyncLoad) -> None:
    offload, tensors = Offload(), [FakeGpuTensor(7)]
    for _ in range(2):
        thread = threading.Thread(target=offload.to_host, args=(tensors,))
        thread.start()
        thread.join()
    assert stream.copied == []


@pytest.mark.parametrize("lacks", ["create_async_load", "async_offload"])
def test_a_build_without_it_reads_as_before(
    stream: FakeAsyncLoad, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    monkeypatch.delattr(manipulation, lacks)
    offload, tensors = Offload(), [FakeGpuTensor(7)]
    for _ in range(3):
        assert offload.to_host(tensors) == tensors


def test_a_failure_is_the_last_try(stream: FakeAsyncLoad, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fails(tensor: Any, load: Any) -> None:
        tried.append(tensor)
        raise RuntimeError("invalid resource handle")

    monkeypatch.setattr(manipulation, "async_offload", fails)
    offload, tensors = Offload(), [FakeGpuTensor(7)]
    for _ in range(4):
        assert offload.to_host(tensors) == tensors
    assert len(tried) == 1


def test_a_meter_reads_all_of_a_step_at_once(stream: FakeAsyncLoad) -> None:
    meter = Meter(0, PhaseClock(0.0))
    meter.to_host = Offload().to_host
    for _ in range(2):
        meter.count(BatchCounts(FakeGpuTensor(12), FakeGpuTensor(9), FakeGpuTensor(8)))
        meter.step()
    meter.reading(2)
    reading = meter.reading(2)
    assert reading is not None
    assert (reading.computed, reading.valid, reading.trained) == (24, 18, 16)
    assert len(stream.copied) == 3
