from __future__ import annotations

import pytest

from collective.job import training_apart


@pytest.fixture(autouse=True)
def _stays_unwatched(monkeypatch: pytest.MonkeyPatch):
    """Lets cases that stand for several ranks make strategies: nothing is replaced for good."""
    monkeypatch.setattr(training_apart, "watch", lambda *args, **kwargs: None)


@pytest.fixture
def rank_threads(monkeypatch: pytest.MonkeyPatch):
    """Returns what function(rank, coordinator) returns or raises on each of N ranks."""
    from tests.unit.rank_threads import RankThreads

    return RankThreads(monkeypatch)
