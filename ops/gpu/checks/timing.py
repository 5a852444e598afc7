"""Times work on a device, compared with a copy of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from collective.ops.gpu.checks import Measurement, Scale
from collective.ops.gpu.device import Device

REPEATS = 40


class Times(NamedTuple):
    """Gives milliseconds, and whether the device was idle in one of the runs (`Timed`)."""

    median: float
    p10: float
    p90: float
    idle: bool


class Row(NamedTuple):
    """Describes one row of the report: see `Measurement`. GB are 10**9 bytes; `percent_of_copy`
    compares bytes per second; `host` says what part of the host's time is included: '', 'waits' if
    the measurement does, or 'idle' if the device was, which should not happen.
    """

    kernel: str
    dim: int | None
    dtype: str | None
    ms: float
    ms_p10: float
    ms_p90: float
    gb_per_s: float
    percent_of_copy: float
    gkeys_per_s: float | None
    host: str


def times(
    device: Device,
    runs: Sequence[Callable[[], object]],
    repeats: int = REPEATS,
    waits: bool = False,
) -> Times:
    """Times `repeats` runs in turn, after each has run once and allocated all that it needs."""
    for run in runs:
        run()
    device.synchronize()
    taken = [device.timed(runs[number % len(runs)], waits) for number in range(repeats)]
    median, p10, p90 = np.percentile([one.ms for one in taken], [50, 10, 90])
    return Times(float(median), float(p10), float(p90), any(one.idle for one in taken))


def copy_bandwidth(device: Device, scale: Scale, repeats: int = REPEATS) -> float:
    """Measures how many bytes per second a copy from device to device reads and writes."""
    size = scale.measured_bytes // 4
    source, target = device.zeros(size, np.uint8), device.zeros(size, np.uint8)
    return (
        2
        * size
        / (1e-3 * times(device, [lambda: device.xp.copyto(target, source)], repeats).median)
    )


def row(device: Device, measurement: Measurement, copied: float, repeats: int = REPEATS) -> Row:
    """Times one `measurement`, where a copy moves `copied` bytes a second."""
    taken = times(device, measurement.runs, repeats, measurement.waits)
    speed = measurement.bytes / (1e-3 * taken.median)
    return Row(
        measurement.kernel,
        measurement.dim,
        measurement.dtype,
        taken.median,
        taken.p10,
        taken.p90,
        speed / 1e9,
        100 * speed / copied,
        None if measurement.keys is None else measurement.keys / (1e6 * taken.median),
        "waits" if measurement.waits else "idle" if taken.idle else "",
    )
