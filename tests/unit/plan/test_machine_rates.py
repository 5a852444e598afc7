"""Figures of machines that a host keeps: they come back, and only to a job like the one before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from collective.ops.communication import membership
from collective.ops.communication.membership import Process
from collective.plan import machine_rates
from collective.plan.machine_rates import file, kept

VALUES = {"memory_rate": 3e9, "flops": 4e10, "within_wait": 2e-5, "within_rate": 5e9}


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """Is one of the two ranks of a host, with a cache; returns what sets another place."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def set_place(process: Process) -> None:
        monkeypatch.setattr(membership, "place", lambda: process)

    set_place(Process(0, 2, 0, 2))
    return set_place


def test_a_job_like_it_finds_what_was_kept(place, tmp_path):
    assert kept() == {}
    machine_rates._keep(VALUES)
    figures = kept()
    assert {name: figure.value for name, figure in figures.items()} == VALUES
    assert {figure.origin for figure in figures.values()} == {"kept"}
    assert str(file()) in figures["flops"].source and file().parent == tmp_path / "collective"
    place(Process(1, 2, 1, 2))
    assert len(kept()) == 4
    for process in (Process(0, 4, 0, 4), Process(0, 2, 0, 1), Process(0, 1, 0, 1)):
        place(process)
        assert kept() == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2}',
        "flops",
        "within_wait",
        "-1",
        "NaN",
        "0",
        '"fast"',
    ],
)
def test_a_file_of_another_kind_is_none(text):
    """Also one with a number that can't be, or without one of them."""
    machine_rates._keep(VALUES)
    content = json.loads(file().read_text())
    if text in VALUES:
        del content["values"][text]
    elif text[:1] in '-N0"' and text:
        content["values"]["flops"] = json.loads(text)
    else:
        content = None
    file().write_text(text if content is None else json.dumps(content))
    assert kept() == {}


def test_another_machine_of_that_name_measures_again():
    """A host name that another machine has now, too: the file's own words count."""
    machine_rates._keep(VALUES)
    content = json.loads(file().read_text())
    content["machine"]["processor"] = "another"
    file().write_text(json.dumps(content))
    assert kept() == {}


def test_a_cache_that_cannot_be_written_only_costs_time(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(
        machine_rates.barrier, "run_on_all_ranks", lambda session, name, step: [VALUES, VALUES]
    )
    monkeypatch.setattr(machine_rates.collectives, "rank", lambda: 0)
    figures = machine_rates.measured()
    assert figures["flops"].value == 4e10 and "not kept: " in figures["flops"].source
    assert kept() == {}


def test_without_a_variable_it_is_the_users_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert file().parent == Path.home() / ".cache" / "collective"


def test_the_slowest_rank_counts(monkeypatch):
    slower = {**VALUES, "flops": 1e9, "within_wait": 5e-5}
    faster = {**VALUES, "memory_rate": 9e9}
    monkeypatch.setattr(
        machine_rates.barrier, "run_on_all_ranks", lambda session, name, step: [faster, slower]
    )
    monkeypatch.setattr(machine_rates.collectives, "rank", lambda: 1)
    figures = {name: figure.value for name, figure in machine_rates.measured().items()}
    assert figures == {**VALUES, "flops": 1e9, "within_wait": 5e-5}
    assert kept() == {}  # rank 0 writes
