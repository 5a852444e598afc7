"""The acceptance scripts, as they are, on ranks of two hosts."""

from __future__ import annotations

import pytest

from tests.jobs import pool
from tests.jobs.test_acceptance import script

pytestmark = [pytest.mark.timeout(280), pytest.mark.matrix]


def on_two_hosts(hosts, ranks, backend, *command):
    """Returns what all ranks say, so many on each host."""
    hosts.make(2)
    environment = {"COLLECTIVE_STRATEGY": backend, "COLLECTIVE_KERNELS": "cpu"}
    launchers = hosts.start_all(ranks, "--device", "cpu", *command, environment=environment)
    ends = hosts.ends(launchers, 150)
    assert [code for code, _, _ in ends] == [0, 0], ends[0][1] + ends[0][2]
    return ends[0][1]


@pytest.mark.long
def test_seed_session(hosts):
    out = on_two_hosts(hosts, 2, "sok", script("seed_session.py"))
    for rank in range(4):
        assert f"rank {rank} of 4: seed session ok" in out


@pytest.mark.long
def test_seed_estimator_and_what_it_exports(hosts, tmp_path):
    out = on_two_hosts(hosts, 1, "hb", script("seed_estimator.py"), "--out", tmp_path / "out")
    for rank in range(2):
        assert f"rank {rank} of 2: seed estimator ok" in out
    served = pool.python(script("serve_check.py"), tmp_path / "out", pool=False)
    assert served.returncode == 0 and "serve check ok" in served.stdout


def test_equivalence(hosts, tmp_path):
    reference = tmp_path / "reference.npz"
    command = (script("equivalence.py"), "--optimizer", "adam")
    assert pool.python(*command, "--reference", reference).returncode == 0
    out = on_two_hosts(hosts, 2, "hb", *command, "--check", reference)
    assert out.count("equals plain TensorFlow") == 4
