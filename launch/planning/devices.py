"""The devices of a job: which GPUs it may use, and which GPU each rank gets.

If CUDA_VISIBLE_DEVICES is set, it lists the devices in their order: indices, UUIDs (GPU-...) or MIG
ids (MIG-...). As in CUDA, an entry that isn't a device (-1, NoDevFiles, an index past the driver's
last) hides itself and all entries after it; empty means none.

NVIDIA_VISIBLE_DEVICES is a request to the container runtime. The devices that it left visible have
new indices from 0, so the variable only says how many there are: none, void or empty means none;
all means every GPU that the driver reports; a list means its length, but at most as many as the
driver reports.

If neither is set, every GPU that the driver reports counts. Without a driver the variables are
taken as they are: CUDA_VISIBLE_DEVICES=0,1 means two devices, so that a job can be planned and
tested on a machine without a GPU.

Two ranks can't share a GPU, except for tests: if COLLECTIVE_TEST_SHARED_GPU is 1, the ranks of a
job take the visible ones in turn. NCCL refuses such ranks if it takes them to be on one host, so
the launcher gives each another NCCL_HOSTID.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from pathlib import Path

from collective.job.errors import UsageError
from collective.launch.planning.nvml import open_nvml

NO_GPUS: tuple[str, ...] = ()
MOST_RANKS = 4096  # on a host
SHARED = "COLLECTIVE_TEST_SHARED_GPU"


def choose_devices(
    ranks: int | str, device: str, gpus: tuple[str, ...], cores: int, shared: bool = False
) -> tuple[str | None, ...]:
    """Returns the device of each rank: a GPU, or None for the CPU.

    Args:
        ranks: how many, or "auto", "gpu" (all visible GPUs), "cpu" (one for each core).
        device: "auto", "cpu" or "gpu".
        gpus: the visible GPUs.
        cores: how many cores are available.
        shared: whether ranks may share a GPU.

    Raises:
        UsageError: there are no such devices, or not enough.
    """
    if isinstance(ranks, int) and ranks < 1:
        raise UsageError(f"-np {ranks}: a job has at least one rank")
    if isinstance(ranks, int) and ranks > MOST_RANKS:
        raise UsageError(f"-np {ranks}: a host has {MOST_RANKS} ranks at most")
    if {str(ranks), device} == {"cpu", "gpu"}:
        raise UsageError(
            f"-np {ranks} and --device {device} contradict each other; leave one of them out"
        )
    if device == "cpu" or ranks == "cpu":
        gpus = NO_GPUS
    elif not gpus and "gpu" in (device, ranks):
        option = "-np gpu" if ranks == "gpu" else "--device gpu"
        raise UsageError(
            f"{option}: no GPU is visible; --device cpu makes CPU ranks, --check tells more"
        )
    if not gpus:
        count = ranks if isinstance(ranks, int) else cores if ranks == "cpu" else 1
        return (None,) * count
    count = ranks if isinstance(ranks, int) else len(gpus)
    if shared:
        return tuple(gpus[rank % len(gpus)] for rank in range(count))
    if count > len(gpus):
        are = "GPUs are" if len(gpus) > 1 else "GPU is"
        raise UsageError(
            f"-np {count} asks for {count} ranks, but {len(gpus)} {are} visible "
            f"({', '.join(gpus)}); --device cpu makes CPU ranks"
        )
    return gpus[:count]


def visible_gpus(environment: Mapping[str, str], driver_uuids: tuple[str, ...]) -> tuple[str, ...]:
    """Returns one CUDA_VISIBLE_DEVICES entry for each GPU that the job may use.

    Args:
        environment: the launcher's environment.
        driver_uuids: the UUIDs of the GPUs that the driver reports ("" where it has an index but no
            UUID); empty without a driver.

    Raises:
        UsageError: CUDA_VISIBLE_DEVICES names a device twice.
    """
    cuda = environment.get("CUDA_VISIBLE_DEVICES")
    if cuda is not None:
        return _cuda_entries(cuda, driver_uuids)
    container = environment.get("NVIDIA_VISIBLE_DEVICES")
    if container is None or container.strip() == "all":
        count = len(driver_uuids)
    elif container.strip() in ("", "none", "void"):
        count = 0
    else:
        count = len([entry for entry in container.split(",") if entry.strip()])
        count = min(count, len(driver_uuids)) if driver_uuids else count
    return tuple(str(index) for index in range(count))


def _cuda_entries(cuda: str, driver_uuids: tuple[str, ...]) -> tuple[str, ...]:
    entries: list[str] = []
    for word in cuda.split(","):
        entry = word.strip()
        if not _is_device(entry, driver_uuids):
            break
        if entry in entries:
            raise UsageError(
                f"CUDA_VISIBLE_DEVICES={cuda} names device {entry} twice, and two ranks can't "
                "share a GPU; name each once"
            )
        entries.append(entry)
    return tuple(entries)


def _is_device(entry: str, driver_uuids: tuple[str, ...]) -> bool:
    if entry.isdigit():
        return not driver_uuids or int(entry) < len(driver_uuids)
    if entry.startswith("GPU-"):
        # If the driver reports all UUIDs, one must match; CUDA also accepts an abbreviated UUID.
        if driver_uuids and all(driver_uuids):
            return any(uuid.startswith(entry) for uuid in driver_uuids)
        return True
    return entry.startswith("MIG-")


def driver_gpus() -> tuple[str, ...]:
    """Returns the UUIDs of the GPUs that NVIDIA's driver reports; none if there is no driver."""
    with contextlib.suppress(AttributeError):
        nvml = open_nvml()
        if nvml is not None:
            return _nvml_uuids(nvml)
    return _proc_uuids(Path("/proc/driver/nvidia/gpus"))


def _nvml_uuids(nvml: ctypes.CDLL) -> tuple[str, ...]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return NO_GPUS
    uuids = []
    for index in range(count.value):
        handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        has_uuid = (
            nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
            and nvml.nvmlDeviceGetUUID(handle, text, len(text)) == 0
        )
        uuids.append(text.value.decode() if has_uuid else "")
    nvml.nvmlShutdown()
    return tuple(uuids)


def _proc_uuids(folder: Path) -> tuple[str, ...]:
    """Reads the UUIDs from /proc, for an image that has the driver but not its library."""
    uuids = []
    for information in sorted(folder.glob("*/information")):
        try:
            lines = information.read_text().splitlines()
        except OSError:
            continue
        uuids.append(next((line.split()[-1] for line in lines if line.startswith("GPU UUID:")), ""))
    return tuple(uuids)
