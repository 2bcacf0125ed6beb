"""What kind of device this process holds."""

from __future__ import annotations

import sys

#: A CPU-only run has no accelerator to count: one worker process stands for one device.
CPU_WORKER = "cpu-worker"
UNKNOWN_DEVICE = "unknown-device"


def device_type() -> str:
    """The name of the device this process trains on, such as "NVIDIA A100-SXM4-80GB".

    Asked of Paddle where the script has loaded it; nothing is imported for it. An accelerator that
    does not tell its name is named by its kind ("xpu"), and without Paddle the device is unknown.
    """
    paddle = sys.modules.get("paddle")
    if paddle is None:
        return UNKNOWN_DEVICE
    kind = str(paddle.device.get_device()).partition(":")[0]
    if kind == "cpu":
        return CPU_WORKER
    if kind == "gpu":
        return str(paddle.device.cuda.get_device_name())
    return kind
