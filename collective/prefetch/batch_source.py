"""Feeds runs of a script with batches whose keys were exchanged ahead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Set
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination.agreement import RUNNING, Header
from collective.coordination.coordinator import Coordinator
from collective.coordination.prepared_run import Membership
from collective.coordination.run_extension import RewrittenFetches, RunExtension, SessionPart
from collective.errors import RankError
from collective.job.progress_board import Phase
from collective.ops.graph import graph_analysis
from collective.prefetch.graph_split import GraphSplit, key_run
from collective.prefetch.one_rank import BatchesOfOneRank
from collective.prefetch.prefetcher import Outcome, Prefetcher
from collective.tensorflow_internals.sessions import session as session_lib


class PrefetchedKeys(RunExtension):
    """Lets the runs of a graph that was split take batches whose keys were exchanged ahead.

    Attributes:
        split: the graph, split.
    """

    def __init__(self, split: GraphSplit):
        self.split = split

    def rewrite_fetches(self, fetches: Any) -> RewrittenFetches | None:
        self.split.redirect_new_operations()
        with self.split.graph.as_default():
            try:
                mapper = session_lib._FetchMapper.for_fetch(fetches)
                fetched = mapper.unique_fetches()
                staged = [self.split.staged_fetch(leaf) for leaf in fetched]
            except (TypeError, ValueError, KeyError):
                # TensorFlow refuses them itself.
                return None
        if all(x is y for x, y in zip(staged, fetched)):
            return None
        return RewrittenFetches(staged, mapper.build_results)

    def reads_iterator_started_by(self, operations: Iterable[tf.Operation]) -> bool:
        return self.split.is_restarted_by(operations)

    def takes_part_in(self, operations: Iterable[tf.Operation]) -> bool:
        return self.split.stage.take in operations

    def executed_ahead(
        self, operations: Set[tf.Operation], fed: Iterable[str]
    ) -> Set[tf.Operation]:
        if not self.takes_part_in(operations) or not self.split.feedable.isdisjoint(fed):
            return frozenset()
        return self.split.prefetched

    def when_agreed(self) -> tf.Operation:
        return self.split.start.release()

    def join(self, session: Any, member: Membership, coordinator: Coordinator) -> SessionPart:
        return BatchSource(session, member, coordinator, self.split)

    def join_alone(self, session: Any) -> SessionPart:
        return BatchesOfOneRank(session, self.split)


class BatchSource(SessionPart):
    """Takes the batches of one session from its prefetcher."""

    def __init__(
        self, session: Any, member: Membership, coordinator: Coordinator, split: GraphSplit
    ):
        self._member, self._coordinator, self._split = member, coordinator, split
        self._prefetcher = Prefetcher(session, member.number, coordinator.channel, split)

    def feeds(
        self, trains: bool, gated: bool, feeds: dict[Any, Any], description: str
    ) -> dict[str, Any]:
        """Returns the feeds that tell a run which batch to take.

        The next batch's keys are exchanged during the run. If the script feeds a batch itself, the
        keys of that are exchanged here and now, and what was taken ahead stays for later.

        Raises:
            Exception: what the ranks have learned about the batch: the data's end, an id outside
                its table.
        """
        prefetcher, stage = self._prefetcher, self._split.stage
        self._coordinator.progress.enters(Phase.AGREEING)
        prefetcher.join()
        batch_feeds = {
            leaf: value
            for leaf, value in feeds.items()
            if not self._split.feedable.isdisjoint(graph_analysis.tensor_names(leaf))
        }
        if not batch_feeds:
            self._raise_if_failed(prefetcher.outcome())
        batch = prefetcher.staged
        if batch_feeds or batch is None:
            batch = self._exchange_now(batch_feeds, trains, description)
        else:
            prefetcher.staged = None
        starts_next = not batch_feeds and gated
        if starts_next:
            prefetcher.start(trains)
        return {stage.batch.name: batch, self._split.start.releases.name: starts_next}

    def _exchange_now(self, batch_feeds: dict[Any, Any], trains: bool, description: str) -> int:
        """Exchanges the keys of a batch that wasn't taken ahead, and returns the batch's number."""
        names = [name for leaf in batch_feeds for name in graph_analysis.tensor_names(leaf)]
        run = key_run(self._split, sorted(names))
        # A rank that has keys already, or exchanges none ahead, runs something else.
        self._coordinator.agree(
            Header(RUNNING, self._member.number, run.footprint.signature),
            self._member,
            run.footprint.shared,
            f"{description} (whose keys it exchanges first, with prefetch_keys)",
        )
        batch, outcome = self._prefetcher.exchange(run, batch_feeds, trains)
        self._raise_if_failed(outcome)
        return batch

    def run_stopped(self) -> None:
        self._prefetcher.stop()

    def abandon(self) -> None:
        self._prefetcher.abandon()

    def iterator_restarts(self) -> None:
        self._coordinator.progress.enters(Phase.AGREEING)
        with contextlib.suppress(tf.errors.OpError):
            self._raise_if_failed(self._prefetcher.drop())

    def wait(self) -> None:
        self._prefetcher.join()

    def leave(self) -> None:
        self._coordinator.progress.enters(Phase.AGREEING)
        with contextlib.suppress(tf.errors.OpError, RankError):
            self._prefetcher.join()
            self._raise_if_failed(self._prefetcher.outcome())

    def _raise_if_failed(self, outcome: Outcome | None) -> None:
        """Raises what all ranks have learned in a run of keys, if it didn't end well."""
        if outcome is None:
            return
        error, verdict = outcome.error, outcome.verdict
        if outcome.headers is None:
            self._coordinator.broken = f"{type(error).__name__}: {error}"
            raise error or RankError(self._coordinator.broken)
        self._member.note(outcome.headers, verdict)
        failed = error is not None and not isinstance(error, tf.errors.OutOfRangeError)
        if error is not None and (failed or isinstance(verdict, tf.errors.OutOfRangeError)):
            raise error
        if verdict is not None:
            raise verdict
