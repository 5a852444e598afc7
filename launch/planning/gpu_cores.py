"""Finds the cores near each rank's GPU, to which the rank is bound (--bind).

A host with several processors has several NUMA nodes: a GPU hangs on one of them, and memory of
another node is slower to reach, for the processor and for copies to the GPU. NVIDIA's driver tells
which cores are near a GPU. A rank that is bound to them also gets its memory there, as Linux takes
memory of the node on which it is first written. torchrun's `--numa-binding node` does the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from collective.launch.planning.nvml import open_nvml

CHOICES = ("auto", "none")
# The cores that a machine may have.
_MOST_CORES = 8192
_WORD = ctypes.c_ulong


def bound_cores(
    devices: Sequence[str | None],
    available: frozenset[int],
    near: Callable[[str], frozenset[int]],
) -> dict[str, frozenset[int]]:
    """Returns the cores to which the ranks of some GPUs are bound, by the GPU.

    Ranks of a GPU aren't bound if the driver doesn't tell which cores are near it, if the launcher
    may use none of them, or if it may use no others.

    Args:
        devices: each rank's entry for CUDA_VISIBLE_DEVICES, None for a CPU rank.
        available: the cores that the launcher may use.
        near: returns the cores near a GPU; empty if they aren't known.
    """
    known = {device: near(device) & available for device in devices if device is not None}
    return {device: cores for device, cores in known.items() if cores and cores != available}


def cores_near(device: str) -> frozenset[int]:
    """Returns the cores near a GPU, as NVIDIA's driver tells; empty if it doesn't.

    Args:
        device: an entry for CUDA_VISIBLE_DEVICES: an index or a UUID. Of a MIG instance the driver
            tells nothing.
    """
    nvml = open_nvml()
    if nvml is None:
        return frozenset()
    try:
        return _cores_near(nvml, device)
    except AttributeError:  # an old driver
        return frozenset()
    finally:
        nvml.nvmlShutdown()


def _cores_near(nvml: ctypes.CDLL, device: str) -> frozenset[int]:
    handle = ctypes.c_void_p()
    found = (
        nvml.nvmlDeviceGetHandleByIndex_v2(int(device), ctypes.byref(handle))
        if device.isdigit()
        else nvml.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle))
    )
    bits = 8 * ctypes.sizeof(_WORD)
    words = (_WORD * (_MOST_CORES // bits))()
    if found != 0 or nvml.nvmlDeviceGetCpuAffinity(handle, len(words), words) != 0:
        return frozenset()
    return frozenset(
        bits * place + bit
        for place, word in enumerate(words)
        for bit in range(bits)
        if word >> bit & 1
    )


def described(cores: frozenset[int]) -> str:
    """Returns cores as Linux writes them: 0-15,32-47."""
    spans: list[list[int]] = []
    for core in sorted(cores):
        if spans and core == spans[-1][1] + 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
