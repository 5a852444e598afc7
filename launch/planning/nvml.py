"""Opens NVIDIA's management library, which comes with the driver."""

from __future__ import annotations

import ctypes


def open_nvml() -> ctypes.CDLL | None:
    """Returns the library, to be shut down by `nvmlShutdown`; None if there is no driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        return nvml if nvml.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None
