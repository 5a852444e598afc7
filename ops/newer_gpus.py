"""Lets CuPy compile for a GPU that is newer than its compiler: as PTX, which the driver compiles.

CuPy has NVRTC make machine code for the GPU, or for the newest that NVRTC knows. A GPU of a later
generation runs no such code: NVRTC 12.5 knows GPUs up to sm_90, and an sm_100 or sm_120 refuses
sm_90's. It runs PTX of any older generation. CuPy makes that if `CUPY_COMPILE_WITH_PTX` is 1 when
it is imported. The driver must know NVRTC's release for that, as every driver of a newer GPU does.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
from pathlib import Path
from typing import Any

VARIABLE = "CUPY_COMPILE_WITH_PTX"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


def before_cupy() -> None:
    """Sets CuPy's variable where a GPU needs it. Call it before CuPy is imported.

    A value of the user's stays. So does CuPy's own choice where the driver or NVRTC isn't found.
    """
    nvrtc = preloaded_nvrtc()
    gpu = None if VARIABLE in os.environ else newest_gpu(_library("libcuda.so.1"))
    if gpu is not None and nvrtc is not None and gpu > newest_known(nvrtc):
        os.environ[VARIABLE] = "1"


def preloaded_nvrtc() -> Any:
    """Loads the NVRTC of NVIDIA's wheel, else the system's; returns None if there is none.

    CuPy 13 finds a wheel's only by name, once it is loaded.
    """
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found is not None else ():
        for file in sorted(Path(folder).glob("cuda_nvrtc/lib/libnvrtc.so.*")):
            library = _library(str(file), ctypes.RTLD_GLOBAL)
            if library is not None:
                return library
    return _library("libnvrtc.so.12")


def newest_known(nvrtc: Any) -> int:
    """Returns the newest compute capability that NVRTC compiles for, 90 say; 0 if it tells none."""
    count = ctypes.c_int()
    if nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count)) != 0:
        return 0
    known = (ctypes.c_int * count.value)()
    return max(known, default=0) if nvrtc.nvrtcGetSupportedArchs(known) == 0 else 0


def newest_gpu(driver: Any) -> int | None:
    """Returns the highest compute capability of this process's GPUs, 100 say, or None.

    Args:
        driver: CUDA's driver library, or None.
    """
    count = ctypes.c_int()
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None
    found = []
    for number in range(count.value):
        device, values = ctypes.c_int(), []
        driver.cuDeviceGet(ctypes.byref(device), number)
        for attribute in (_MAJOR, _MINOR):
            value = ctypes.c_int()
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            values.append(value.value)
        found.append(10 * values[0] + values[1])
    return max(found, default=None)


def _library(name: str, mode: int = ctypes.DEFAULT_MODE) -> Any:
    with contextlib.suppress(OSError):
        return ctypes.CDLL(name, mode)
    return None
