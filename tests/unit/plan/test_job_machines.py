"""What the planner is told of the machines of a job."""

from __future__ import annotations

import pytest

from collective.ops.communication import hierarchy, membership
from collective.ops.communication.hierarchy import Bandwidths
from collective.ops.communication.membership import Process
from collective.plan import job_machines


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    "process, hosts",
    [
        (Process(0, 1, 0, 1), 1),
        (Process(3, 8, 3, 8), 1),
        (Process(3, 8, 1, 2), 4),
        (Process(0, 5, 0, 3), 5),  # 3 ranks on one, 2 on another
    ],
)
def test_hosts_are_those_of_the_job(monkeypatch, process, hosts):
    monkeypatch.setattr(membership, "place", lambda: process)
    monkeypatch.setattr(job_machines, "memory_bytes", lambda: 48 * 10**9)
    machines = job_machines.of_job()
    assert (machines.ranks, machines.hosts) == (process.size, hosts)
    assert machines.device.memory.value == 48e9 / process.local_size
    assert machines.device.memory.origin == "measured"


def test_rates_between_hosts_are_measured_ones(monkeypatch):
    monkeypatch.setattr(membership, "place", lambda: Process(0, 4, 0, 2))
    assert job_machines.of_job().device.between_rate.origin == "assumed"
    monkeypatch.setattr(hierarchy, "bandwidths", lambda: Bandwidths(6e9, 1.1e8))
    device = job_machines.of_job().device
    assert (device.within_rate.value, device.between_rate.value) == (6e9, 1.1e8)
    assert {device.within_rate.origin, device.between_rate.origin} == {"measured"}
