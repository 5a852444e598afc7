from __future__ import annotations

import pytest


@pytest.fixture
def rank_threads(monkeypatch: pytest.MonkeyPatch):
    """rank_threads(N, function): what function(rank, coordinator) returns or raises on each rank."""
    from tests.unit.rank_threads import RankThreads

    return RankThreads(monkeypatch)
