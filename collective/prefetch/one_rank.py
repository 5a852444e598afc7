"""Feeds runs of a script on one rank with batches whose keys were prepared ahead.

    script      run of batch i            run of batch i + 1
    keys        keys of batch i + 1       keys of batch i + 2

One rank exchanges nothing, but it checks the ids of a batch, joins them, and copies them to the
GPU. A run of keys does that on a separate thread. There are no peers to agree with: it begins as
the script's run does, and what it fails with is raised by the run that would have used its batch.
"""

from __future__ import annotations

import collections
import threading
from typing import Any

from collective.coordination.run_extension import SessionPart
from collective.ops.graph import graph_analysis
from collective.ops.graph.sessions import run_unpatched
from collective.prefetch.graph_split import GraphSplit, key_run
from collective.prefetch.prefetcher import start_thread


class BatchesOfOneRank(SessionPart):
    """Takes the batches of one session of the only rank.

    Args:
        session: the session.
        split: its graph, split.
    """

    def __init__(self, session: Any, split: GraphSplit):
        self._session, self._split = session, split
        self._one_at_a_time = threading.Lock()
        self._count = 0
        # The numbers of batches that no run has taken, in the order of the data.
        self._staged: collections.deque[int] = collections.deque()
        # What the batch after those failed with.
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def feeds(
        self, trains: bool, gated: bool, feeds: dict[Any, Any], description: str
    ) -> dict[str, Any]:
        """Returns the feed that tells a run which batch to take.

        The next batch's keys are prepared during the run. If the script feeds a batch itself, the
        keys of that are prepared here and now, and what was taken ahead stays for later.

        Raises:
            Exception: what taking the batch failed with: the data's end, an id outside its table.
        """
        batch_feeds = {
            leaf: value
            for leaf, value in feeds.items()
            if not self._split.feedable.isdisjoint(graph_analysis.tensor_names(leaf))
        }
        with self._one_at_a_time:
            self.wait()
            if batch_feeds:
                batch = self._stage(batch_feeds)
            else:
                batch = self._next()
                if not self._staged and self._error is None:
                    self._start()
        return {self._split.stage.batch.name: batch}

    def run_never_started(self, fed: dict[str, Any]) -> None:
        """Keeps the batch of a run that TensorFlow has refused before it began.

        Args:
            fed: what `feeds` had returned for the run.
        """
        with self._one_at_a_time:
            self.wait()
            self._staged.appendleft(fed[self._split.stage.batch.name])

    def abandon(self) -> None:
        self._thread = None

    def iterator_restarts(self) -> None:
        with self._one_at_a_time:
            self.wait()
            self._staged.clear()
            self._error = None
            run_unpatched(self._session, self._split.stage.clear)

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def leave(self) -> None:
        self.wait()

    def _next(self) -> int:
        """Returns the number of the next batch of the data, which is taken now if it wasn't."""
        if self._staged:
            return self._staged.popleft()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._stage({})

    def _stage(self, batch_feeds: dict[Any, Any]) -> int:
        """Prepares the keys of a batch, stages it, and returns its number."""
        names = [name for leaf in batch_feeds for name in graph_analysis.tensor_names(leaf)]
        key_run(self._split, sorted(names))  # refuses a batch that is fed in part
        self._count += 1
        start, stage = self._split.start, self._split.stage
        feeds = {**batch_feeds, start.wait.name: 1, stage.number.name: self._count}
        run_unpatched(self._session, stage.put, feeds)
        return self._count

    def _start(self) -> None:
        """Starts a run of keys on a thread of its own."""

        def work() -> None:
            try:
                self._staged.append(self._stage({}))
            except Exception as error:
                self._error = error

        self._thread = start_thread(work)
