"""Exchanges that hosts merge give the numbers of one host, with every kind of table and lookup."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest

from tests.jobs import pool

pytestmark = [pytest.mark.timeout(280), pytest.mark.matrix]
PROGRAM, STEPS = Path(__file__).with_name("merged_training.py"), 6


def told(output, word):
    return json.loads(re.search(f"{word} (.*)", output)[1])


def on_hosts(hosts, backend, **options):
    how = {"environment": {"COLLECTIVE_STRATEGY": backend}}
    job = ("--device", "cpu", PROGRAM, STEPS, json.dumps(options))
    ends = hosts.ends(hosts.start_all(2, *job, **how), 150)
    assert [code for code, _, _ in ends] == [0, 0], ends[0][2]
    return ends[0][1]


def on_one_host(backend, **options):
    job = ("--device", "cpu", PROGRAM, STEPS, json.dumps(options))
    environment = {"COLLECTIVE_STRATEGY": backend}
    done = pool.launch("-np", 4, *job, environment=environment, timeout=150)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def one_host():
    """Returns what the job gives on one host, in the order of the ranks."""
    return on_one_host("hb", deterministic=True)


@pytest.mark.long
@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", ["hb", "sok"])
def test_merged_exchanges_train_as_one_host_does(hosts, one_host, backend):
    hosts.make(2)
    output = on_hosts(hosts, backend, hierarchical=True)
    words, reaches = told(output, "plan")
    assert words.startswith("two levels: the 2 ranks of each of 2 hosts merge")
    assert sorted(reaches) == sorted(
        ["keys within host", "keys between hosts"]
        + ["rows within host", "rows between hosts"]
        + ["gradients within host", "gradients between hosts"]
    )
    np.testing.assert_allclose(told(output, "norms"), told(one_host, "norms"), rtol=1e-5)
    for values, expected in zip(told(output, "values"), told(one_host, "values")):
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", ["hb", "sok"])
def test_deterministic_training_has_the_bits_of_one_host(hosts, one_host, backend):
    """Only rows are merged then: gradients are added in the order of all ranks."""
    hosts.make(2)
    output = on_hosts(hosts, backend, hierarchical=True, deterministic=True)
    words, reaches = told(output, "plan")
    assert "2 hosts merge the rows that they get of others" in words
    assert words.endswith("gradients are added in the order of all ranks")
    # Dense gradients are summed in order by all-to-alls, too.
    assert sorted(x for x in reaches if re.match("keys|rows|gradients", x)) == sorted(
        ["keys within host", "keys within host", "keys between hosts"]
        + ["rows within host", "rows between hosts"]
        + ["gradients within host", "gradients between hosts"]
    )
    expected = one_host if backend == "hb" else on_one_host(backend, deterministic=True)
    assert re.search("bits .*", output)[0] == re.search("bits .*", expected)[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["cut", "killed"])
def test_a_host_that_is_lost_in_a_step_ends_the_job_within_the_bound(hosts, how):
    """A proxy that waits for it doesn't hold its host's ranks, nor they the launcher."""
    hosts.make(2)
    job = ("--device", "cpu", PROGRAM, 10**7, json.dumps({"hierarchical": True}), hosts.folder)
    launchers = hosts.start_all(2, "--host-timeout", 3, *job)
    files = [hosts.folder / f"rank{rank}" for rank in range(4)]
    hosts.wait_until(lambda: all(file.exists() for file in files), "three steps", 120)
    start = time.monotonic()
    if how == "cut":
        hosts.network.cut("h2")
    else:
        launchers[1].kill()
    (code, _, stderr), (other_code, _, other) = hosts.ends(launchers, 60)
    # The bound, 5 s of grace, and what a busy machine takes.
    assert time.monotonic() - start < 30
    assert (code, other_code) == (137, 137 if how == "cut" else -9)
    assert "root cause: host h2 (ranks 2, 3 of 4) was lost" in stderr
    if how == "cut":
        assert "root cause: the first host, h1, was lost" in other
