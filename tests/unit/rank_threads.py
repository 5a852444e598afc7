"""Ranks as threads of one process, which agree over a channel in memory.

The names of the modules under test are imported here, once for all tests of them.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

import pytest
import tensorflow.compat.v1 as tf

from collective.coordination import agreement, barrier, coordinator, prepared_run, run_analysis
from collective.errors import RankError
from collective.ops.communication import collectives

__all__ = ["RankError", "agreement", "barrier", "coordinator", "prepared_run", "run_analysis"]

# A rank that waits longer for its peers fails its test.
PATIENCE = 20.0


class Session:
    """As much of a session as a coordinator needs to see."""

    def __init__(self) -> None:
        self.graph = tf.Graph()


class Exchange:
    """What N threads say at the same time, each to all."""

    def __init__(self, ranks: int):
        self._values: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=PATIENCE)

    def __call__(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()  # nobody says the next before all have heard this
        return values


class MemoryChannel:
    """Is one rank's `agreement.SideChannel`, in memory; notes the headers that it has exchanged."""

    def __init__(self, rank: int, headers: Exchange, texts: Exchange):
        self.rank = rank
        self._headers, self._texts = headers, texts
        self.exchanged: list[list[Any]] = []

    def headers(self, header: Any, channel: str = "") -> list[Any]:
        self.exchanged.append(self._headers(self.rank, header))
        return self.exchanged[-1]

    def texts(self, text: dict[str, Any], channel: str = "") -> list[dict[str, Any]]:
        return [json.loads(each) for each in self._texts(self.rank, json.dumps(text))]


class RankThreads:
    """Runs a function on N threads, each of which has a coordinator of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._patch = monkeypatch

    def __call__(self, ranks: int, function: Callable[[int, Any], Any]) -> list[Any]:
        """Returns what `function(rank, coordinator)` returns, or raises, on each rank."""
        headers, texts, local = Exchange(ranks), Exchange(ranks), threading.local()
        self._patch.setattr(collectives, "size", lambda: ranks)
        self._patch.setattr(collectives, "rank", lambda: local.rank)
        self._patch.setattr(coordinator, "instance", lambda: local.coordinator)
        made = []
        for rank in range(ranks):
            channel = MemoryChannel(rank, headers, texts)
            self._patch.setattr(agreement, "SideChannel", lambda channel=channel: channel)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "excepthook", sys.excepthook)  # which each one replaces
                made.append(coordinator.Coordinator())
            atexit.unregister(made[-1].leave_all)

        def on_rank(rank: int) -> Any:
            local.rank, local.coordinator = rank, made[rank]
            try:
                return function(rank, made[rank])
            except Exception as error:
                return error

        with ThreadPoolExecutor(ranks) as threads:
            return list(threads.map(on_rank, range(ranks)))
