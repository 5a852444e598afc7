"""Which GPUs a job may use.

=========================
============================================================================================
CUDA_VISIBLE_DEVICES set   its entries in its order: indices, UUIDs (GPU-...) or MIG ids (MIG-...).
                           As in CUDA, an entry that isn't a device (-1, NoDevFiles, an index past
                           the driver's last) hides itself and all that follow; empty means none
NVIDIA_VISIBLE_DEVICES     a container's wish. What it left visible has new indices from 0, so it
                           only says how many: none, void or empty: none; all: every GPU the driver
                           reports; a list: its length, at most as many as the driver reports
neither                    every GPU that the driver reports
=========================
============================================================================================

Without a driver (nothing to ask) the variables are believed as they stand: CUDA_VISIBLE_DEVICES=0,1
is two devices, so that a job can be planned and tested on a machine without a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

from .usage import UsageError

NO_GPUS: tuple[str, ...] = ()


def visible_gpus(environment: Mapping[str, str], driver: tuple[str, ...]) -> tuple[str, ...]:
    """One CUDA_VISIBLE_DEVICES entry for each GPU the job may use.

    Args:
      environment: the launcher's.
      driver: the UUIDs of the GPUs that the driver reports ("" where it has an index but no UUID),
          none without one.

    Raises:
      UsageError: CUDA_VISIBLE_DEVICES names a device twice.
    """
    asked = environment.get("CUDA_VISIBLE_DEVICES")
    if asked is not None:
        return _cuda_entries(asked, driver)
    wish = environment.get("NVIDIA_VISIBLE_DEVICES")
    if wish is None or wish.strip() == "all":
        count = len(driver)
    elif wish.strip() in ("", "none", "void"):
        count = 0
    else:
        count = len([entry for entry in wish.split(",") if entry.strip()])
        count = min(count, len(driver)) if driver else count
    return tuple(str(index) for index in range(count))


def _cuda_entries(asked: str, driver: tuple[str, ...]) -> tuple[str, ...]:
    entries: list[str] = []
    for entry in (word.strip() for word in asked.split(",")):
        if not _is_device(entry, driver):
            break
        if entry in entries:
            raise UsageError(
                f"CUDA_VISIBLE_DEVICES={asked} names device {entry} twice, and two ranks can't "
                f"share a GPU; "
                "name each once"
            )
        entries.append(entry)
    return tuple(entries)


def _is_device(entry: str, driver: tuple[str, ...]) -> bool:
    if entry.isdigit():
        return not driver or int(entry) < len(driver)
    if entry.startswith("GPU-"):  # CUDA takes an abbreviated UUID, too
        return not all(driver) or not driver or any(uuid.startswith(entry) for uuid in driver)
    return entry.startswith("MIG-")


def driver_gpus() -> tuple[str, ...]:
    """The UUIDs of the GPUs that NVIDIA's driver reports; none if there is no driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            return _nvml_uuids(nvml)
    except (OSError, AttributeError):
        pass
    return _proc_uuids(Path("/proc/driver/nvidia/gpus"))


def _nvml_uuids(nvml: ctypes.CDLL) -> tuple[str, ...]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return NO_GPUS
    uuids = []
    for index in range(count.value):
        handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        found = (
            nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
            and nvml.nvmlDeviceGetUUID(handle, text, len(text)) == 0
        )
        uuids.append(text.value.decode() if found else "")
    nvml.nvmlShutdown()
    return tuple(uuids)


def _proc_uuids(folder: Path) -> tuple[str, ...]:
    """The same from /proc, for an image that has the driver but not its library."""
    uuids = []
    for information in sorted(folder.glob("*/information")):
        try:
            lines = information.read_text().splitlines()
        except OSError:
            continue
        uuids.append(next((line.split()[-1] for line in lines if line.startswith("GPU UUID:")), ""))
    return tuple(uuids)
