"""The machine's resources that this process may use: cores, memory, shared memory.

A container's limits count as well as the hardware: a quota of two cores on a machine of 64 cores is
two cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Returns how many cores affinity and the cgroup's quota allow, at least one."""
    cores = len(os.sched_getaffinity(0))
    quotas = [quota for quota in (_quota_v2(), _quota_v1()) if quota is not None]
    return max(1, min([cores, *(int(quota) for quota in quotas)]))


def memory_bytes() -> int:
    """Returns the machine's memory, or the cgroup's limit if that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for controller, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        for folder in _folders(controller):
            text = _read(folder / name)
            if text.isdigit():
                limits.append(int(text))
    return min(limits)


def shared_memory_bytes() -> int:
    """Returns the size of /dev/shm, 0 if there is none."""
    try:
        size = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return size.f_frsize * size.f_blocks


def _quota_v2() -> float | None:
    """Returns the smallest cpu.max of this cgroup and those above it, in cores."""
    quotas = []
    for folder in _folders(""):
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _quota_v1() -> float | None:
    """Returns the smallest quota of cgroups version 1, in cores."""
    quotas = []
    for folder in _folders("cpu"):
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):  # -1 is "no quota"
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _folders(controller: str) -> Iterator[Path]:
    """Yields this process's cgroup folder and those above it; `controller` "" means version 2.

    In a container the path in /proc/self/cgroup may be the host's path, which isn't mounted. The
    root of the mount is then this process's cgroup, so the way up always ends there.
    """
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller not in names.split(","):
            continue
        mounts = {_CGROUPS / names, _CGROUPS / controller} if controller else {_CGROUPS}
        for mount in mounts:
            folder = mount / path.lstrip("/")
            for ancestor in (folder, *folder.parents):
                if ancestor == mount or mount in ancestor.parents:
                    yield ancestor


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
