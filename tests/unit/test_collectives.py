"""A process joins its job once."""

from __future__ import annotations

import atexit

import pytest

from collective.ops import collectives


@pytest.fixture
def registered(monkeypatch):
    """Returns what is registered with atexit meanwhile."""
    functions = []
    monkeypatch.setattr(atexit, "register", lambda function, *_: functions.append(function))
    return functions


def test_horovod_is_shut_down_behind_what_was_registered_since(registered):
    """Its shutdown would come first if it were registered again."""
    collectives.init()
    registered.clear()
    collectives.init()
    assert registered == [] and (collectives.rank(), collectives.size()) == (0, 1)


def test_horovod_is_initialized_again_behind_its_shutdown():
    collectives.init()
    collectives.hvd.shutdown()
    assert not collectives.hvd.is_initialized()
    collectives.init()
    assert collectives.size() == 1
