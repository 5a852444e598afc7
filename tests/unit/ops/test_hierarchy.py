"""When what travels between hosts is merged on each of them, and what the plan says of it."""

from __future__ import annotations

import contextlib
import time

import pytest
from tensorflow.python.framework import config

from collective.ops import kernel_device
from collective.ops.communication import carrier_choice, hierarchy
from collective.ops.communication.hierarchy import Bandwidths, Hosts, hosts_of
from collective.ops.communication.membership import Process


@pytest.fixture(autouse=True)
def job(monkeypatch):
    """Makes a rank of a job on two hosts of two ranks each, which share memory."""
    process = Process(0, 4, 0, 2)
    monkeypatch.setattr(carrier_choice._meeting, "joined", process)
    monkeypatch.setattr(carrier_choice._meeting, "unavailable", "")
    monkeypatch.setattr(carrier_choice._meeting, "scope_choice", None)
    monkeypatch.delenv(carrier_choice.VARIABLE, raising=False)
    monkeypatch.setattr(kernel_device, "chosen", lambda: "cpu")
    monkeypatch.setattr(hierarchy, "_merging", hierarchy._Merging())
    return process


@pytest.mark.parametrize(
    ("local_ranks", "hosts"),
    [
        ([0, 1, 0, 1], Hosts(2, 2)),
        ([0, 1, 2, 0, 1, 2, 0, 1, 2], Hosts(3, 3)),
        ([0, 1, 0], "hosts have different numbers of ranks: 2, 1"),
        ([0, 0, 0], "every host has one rank"),
        ([0, 1], "all ranks are on one host"),
        ([0, 0, 1, 1], "the ranks of a host don't follow each other"),
    ],
)
def test_hosts_are_alike_or_it_says_why_not(local_ranks, hosts):
    assert hosts_of(local_ranks) == hosts


def settle(process, words, memory=0.0, network=0.0):
    """Settles with a probe that takes so many seconds; returns how often it was sent."""
    sent = []

    def send(within):
        sent.append(within)
        time.sleep(memory if within else network)

    given = iter(words)
    probe = lambda: contextlib.nullcontext(send)  # noqa: E731
    hierarchy.settle(process, lambda own: next(given, None) or [own] * 4, probe)
    return sent


def test_all_ranks_go_by_the_slowest_of_each(job):
    settle(job, [["0", "1", "0", "1"], ["9e9 2e8", "8e9 3e8", "9e9 3e8", "9e9 3e8"]])
    assert hierarchy._merging.settled.bandwidths == Bandwidths(8e9, 2e8)
    assert hierarchy.of_group() == Hosts(2, 2)
    assert hierarchy.explanation() == (
        "two levels: the 2 ranks of each of 2 hosts merge what they exchange with others (auto, by "
        "8 GB/s a rank within a host and 0.2 between hosts; from 8 times on it is two levels)"
    )


def test_numbers_stand_for_what_they_say(job):
    settle(job, [["0", "1", "0", "1"], ["1e9 1e9"] * 4])
    hierarchy.use(1)
    assert hierarchy.of_group() == Hosts(2, 2)
    hierarchy.use(0)
    assert hierarchy.of_group() is None and "hierarchical=False" in hierarchy.explanation()


def test_it_measures_both(job):
    assert sorted(set(settle(job, [["0", "1", "0", "1"]], 0.001, 0.02))) == [False, True]
    rates = hierarchy._merging.settled.bandwidths
    assert rates.memory > 2 * rates.network > 0


def test_auto_is_flat_where_the_network_is_fast(job):
    settle(job, [["0", "1", "0", "1"], ["4e9 1e9"] * 4])
    assert hierarchy.of_group() is None
    assert hierarchy.explanation().startswith("flat: auto, by 4 GB/s a rank within a host and 1 ")
    hierarchy.use(True)
    assert hierarchy.of_group() == Hosts(2, 2)
    assert hierarchy.explanation().endswith("(scope(hierarchical=True))")
    hierarchy.use(False)
    assert hierarchy.explanation() == "flat: scope(hierarchical=False)"


def test_unequal_hosts_are_flat_whatever_is_wanted(job):
    assert settle(job, [["0", "1", "2", "0"]]) == []
    hierarchy.use(True)
    assert hierarchy.explanation() == "flat: hosts have different numbers of ranks: 3, 1"


def test_what_can_not_be_merged_is_flat(job, monkeypatch):
    settle(job, [["0", "1", "0", "1"], ["9e9 1e8"] * 4])
    hierarchy.use(True)
    with monkeypatch.context() as patch:
        patch.setattr(kernel_device, "chosen", lambda: "gpu")
        assert hierarchy.why_flat() == "tables are on GPUs"
    carrier_choice.use("horovod")
    assert hierarchy.why_flat() == "Horovod carries everything"
    monkeypatch.setattr(carrier_choice._meeting, "unavailable", "the ranks have GPUs")
    assert settle(job, [["0", "1", "0", "1"]]) == []
    assert hierarchy.explanation() == "flat: the ranks of a host don't share memory"


def test_deterministic_gradients_are_flat(job, monkeypatch):
    settle(job, [["0", "1", "0", "1"], ["9e9 1e8"] * 4])
    monkeypatch.setattr(config, "is_op_determinism_enabled", lambda: True)
    assert hierarchy.of_group() == Hosts(2, 2)
    assert hierarchy.explanation().startswith(
        "two levels: the 2 ranks of each of 2 hosts merge the rows that they get of others (auto,"
    )
    assert "keys and gradients are flat, by scope(deterministic=True)" in hierarchy.explanation()


def test_a_job_on_one_host_says_nothing(job):
    hierarchy.settle(Process(0, 2, 0, 2), None, None)
    assert hierarchy.explanation() == "" and hierarchy.of_group() is None
