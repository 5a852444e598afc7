"""Lists devices by what their makers publish.

A link's published rate counts both directions; a rank sends at half of it. Rates of matrix products
are TensorFlow's default type for float32 (TensorFloat-32 where there is such), without sparsity.
What nobody publishes is assumed for all devices alike, or was measured once with this library
(benchmarks/GPU.md, benchmarks/RESULTS.md).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from collective.planner.machines import (
    RANKS_OF_HOST,
    Device,
    Figure,
    Machines,
    counted_devices,
    find,
)

NVIDIA = "https://www.nvidia.com/en-us/data-center/"
DGX = "https://docs.nvidia.com/dgx/"
GB, TB, GBIT, TERA = 1e9, 1e12, 1e9 / 8, 1e12

_REACHED = Figure(0.5, "measured", "a step on one H100: 1,687 of 3,350 GB/s (benchmarks/GPU.md)")
_WIRE = Figure(0.7, "assumed", "several GPUs have not been measured")
_FLOPS = Figure(0.3, "assumed", "small matrix products")
_USABLE = Figure(0.8, "assumed", "the rest is TensorFlow's, and the network's activations")
_START = Figure(6e-6, "assumed", "TensorFlow's executor and a kernel's launch")
_ID = Figure(0.1e-9, "assumed", "ids are sorted by the GPU")
_NEAR = Figure(40e-6, "assumed", "a small collective of NCCL within a host")
_FAR = Figure(100e-6, "assumed", "a small collective of NCCL between hosts")
_SHARED_NETWORK = Figure(25 * GBIT, "assumed", "100 Gbit/s of a host with four devices")


def _gpu(
    name: str,
    page: str,
    memory: float,
    memory_rate: float,
    flops: float,
    link: tuple[float, str],
    network: Figure = _SHARED_NETWORK,
) -> Device:
    """Describes a GPU.

    Args:
        name: of the device.
        page: that of its maker.
        memory: GB.
        memory_rate: GB/s.
        flops: 10¹² a second.
        link: GB/s of both directions to the GPUs of a host, and by what.
        network: bytes per second to other hosts.
    """
    source = NVIDIA + page
    return Device(
        name,
        memory=Figure(memory * GB, "published", source),
        memory_rate=Figure(memory_rate * GB, "published", source),
        flops=Figure(flops * TERA, "published", source),
        within_rate=Figure(link[0] / 2 * GB, "published", f"{link[1]}, half of it: {source}"),
        between_rate=network,
        start=_START,
        id_time=_ID,
        within_wait=_NEAR,
        between_wait=_FAR,
        usable=_USABLE,
        memory_share=_REACHED,
        wire_share=_WIRE,
        flop_share=_FLOPS,
    )


def _network(gigabits: float, source: str) -> Figure:
    return Figure(gigabits * GBIT, "published", DGX + source)


_HDR = _network(200, "dgxa100-user-guide/ (8 x 200 Gbit/s, InfiniBand HDR)")
_NDR = _network(400, "dgxh100-user-guide/ (8 x 400 Gbit/s, InfiniBand NDR)")
_NDR_B200 = _network(400, "dgxb200-user-guide/ (8 x 400 Gbit/s, InfiniBand NDR)")
_EDR = _network(50, "dgx1-user-guide/ (4 x 100 Gbit/s for 8 GPUs, InfiniBand EDR)")
_GEN3, _GEN4, _GEN5 = (32, "PCIe 3 x16"), (64, "PCIe 4 x16"), (128, "PCIe 5 x16")

# CPU ranks of one host, two cores, through shared memory; between hosts by sockets.
_ONE_MACHINE = "one machine of two cores (benchmarks/RESULTS.md)"
CPU = Device(
    "CPU",
    memory=Figure(16 * GB, "assumed", "give a rank's memory by --memory"),
    memory_rate=Figure(5 * GB, "measured", _ONE_MACHINE),
    flops=Figure(50e9, "measured", _ONE_MACHINE),
    within_rate=Figure(8 * GB, "measured", _ONE_MACHINE),
    between_rate=Figure(10 * GBIT, "assumed", "Ethernet of 10 Gbit/s"),
    start=Figure(4e-6, "measured", _ONE_MACHINE),
    id_time=Figure(0.1e-6, "measured", "benchmarks/planner.py"),
    within_wait=Figure(30e-6, "measured", _ONE_MACHINE),
    between_wait=Figure(350e-6, "measured", "Horovod's sockets (benchmarks/RESULTS.md)"),
    usable=_USABLE,
    memory_share=Figure(1.0, "measured", "contained in the rate"),
    wire_share=Figure(1.0, "measured", "contained in the rate"),
    flop_share=Figure(1.0, "measured", "contained in the rate"),
    sector=64,
)

# Of devices whose names fit, the first is taken.
DEVICES: tuple[Device, ...] = (
    _gpu("H100-SXM-80GB", "h100/", 80, 3350, 494, (900, "NVLink"), _NDR),
    _gpu("H100-PCIe-80GB", "h100/", 80, 2000, 378, _GEN5),
    _gpu("H200-SXM-141GB", "h200/", 141, 4800, 494, (900, "NVLink"), _NDR),
    _gpu("A100-SXM-80GB", "a100/", 80, 2039, 156, (600, "NVLink"), _HDR),
    _gpu("A100-SXM-40GB", "a100/", 40, 1555, 156, (600, "NVLink"), _HDR),
    _gpu("B200-SXM-180GB", "dgx-b200/", 180, 8000, 1100, (1800, "NVLink"), _NDR_B200),
    _gpu("L40S-48GB", "l40s/", 48, 864, 183, _GEN4),
    _gpu("L4-24GB", "l4/", 24, 300, 60, _GEN4),
    _gpu("V100-SXM2-32GB", "v100/", 32, 900, 15.7, (300, "NVLink"), _EDR),
    _gpu("V100-SXM2-16GB", "v100/", 16, 900, 15.7, (300, "NVLink"), _EDR),
    _gpu("T4-16GB", "tesla-t4/", 16, 300, 8.1, _GEN3),
    CPU,
)


def cluster(devices: str, hosts: int | None = None) -> Machines:
    """Returns the machines of a text, by what is published.

    Args:
        devices: how many and which: '64 x H100-80GB'.
        hosts: on how many hosts; by default as many as `RANKS_OF_HOST` on each make.

    Raises:
        ValueError: the text has another form, there is no such device, or hosts would have
            different numbers of ranks.
    """
    ranks, name = counted_devices(devices)
    if hosts is None:
        hosts = -(-ranks // RANKS_OF_HOST)
    return Machines(find(name, DEVICES), ranks, hosts)


def named(name: str) -> Device:
    """Returns the GPU that CUDA calls by a name: 'NVIDIA H100 80GB HBM3'.

    Of a GPU that isn't listed, everything is assumed to be like the first one's of the list.
    """
    words = set(re.split(r"[\s\-_/]+", name.upper()))
    kind = [device for device in DEVICES if device.name.partition("-")[0].upper() in words]
    if kind:  # the one with most parts in common: 'PCIe', '40GB'
        return max(kind, key=lambda device: len(words & set(device.name.upper().split("-"))))
    device = DEVICES[0]
    why = f"nothing is known of {name!r}: like {device.name}"
    figures = {key: Figure(f.value, "assumed", why) for key, f in device.figures().items()}
    changes: dict[str, Any] = {"name": name or "GPU", **figures}
    return dataclasses.replace(device, **changes)
