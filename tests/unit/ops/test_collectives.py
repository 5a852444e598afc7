"""A process joins its job once."""

from __future__ import annotations

import atexit

import pytest

from collective.ops.communication import collectives, membership


@pytest.fixture
def registered(monkeypatch):
    """Returns what is registered with atexit meanwhile."""
    functions = []
    monkeypatch.setattr(atexit, "register", lambda function, *_: functions.append(function))
    return functions


def test_horovod_is_shut_down_after_everything_registered_since(registered):
    """Its shutdown would come first if it were registered again."""
    collectives.init()
    registered.clear()
    collectives.init()
    assert registered == [] and (collectives.rank(), collectives.size()) == (0, 1)


def test_horovod_is_initialized_again_after_its_shutdown():
    collectives.init()
    collectives.hvd.shutdown()
    assert not collectives.hvd.is_initialized()
    collectives.init()
    assert collectives.size() == 1


def test_the_place_is_known_where_a_script_has_started_horovod(monkeypatch):
    collectives.init()
    monkeypatch.setattr(membership, "_process", None)
    assert (collectives.rank(), collectives.size(), membership.local_rank()) == (0, 1, 0)


def test_without_a_job_there_is_no_place(monkeypatch):
    monkeypatch.setattr(membership, "_process", None)
    monkeypatch.setattr(membership, "hvd", None)
    with pytest.raises(ValueError, match=r"make a collective.CollectiveStrategy\(\) first"):
        collectives.size()
