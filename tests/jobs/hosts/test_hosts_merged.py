"""Exchanges that hosts merge give the numbers of one host, with every kind of table and lookup."""

from __future__ import annotations

import json
import re
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


def on_one_host(**options):
    job = ("--device", "cpu", PROGRAM, STEPS, json.dumps(options))
    done = pool.launch("-np", 4, *job, timeout=150)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def one_host():
    """Returns what the job gives on one host, in the order of the ranks."""
    return on_one_host(deterministic=True)


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


def test_deterministic_training_has_the_bits_of_one_host(hosts, one_host):
    hosts.make(2)
    output = on_hosts(hosts, "hb", hierarchical=True, deterministic=True)
    assert told(output, "plan")[0].startswith("flat: scope(deterministic=True)")
    assert re.search("bits .*", output)[0] == re.search("bits .*", one_host)[0]
