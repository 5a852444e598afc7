from __future__ import annotations

import pytest


@pytest.fixture
def rank_threads(monkeypatch: pytest.MonkeyPatch):
    """Returns what function(rank, coordinator) returns or raises on each of N ranks."""
    from tests.unit.rank_threads import RankThreads

    return RankThreads(monkeypatch)
