"""Stands in for the methods by which TensorFlow's sessions run, inside scope() (see `patches`).

`original` is always the method itself. A run that uses no collective, and every run with one rank,
goes straight to it, with the feeds of the graph's extension.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Protocol

import tensorflow.compat.v1 as tf

from collective.coordination import (
    batch_counter,
    coordinator,
    milestones,
    reduced_reads,
    run_analysis,
)
from collective.coordination.preemption import PREEMPTION
from collective.coordination.prepared_run import PreparedRun
from collective.coordination.run_context import RunContext, context_of
from collective.coordination.run_extension import NO_PART
from collective.coordination.run_preparation import prepared_run
from collective.coordination.session_state import note_run
from collective.ops.communication import collectives
from collective.ops.communication.gate import gates_of
from collective.ops.graph import graph_analysis

_FOLLOWS_NOTHING = contextlib.nullcontext()


class Observer(Protocol):
    """Observes training runs (`collective.monitoring.run_observer`).

    Attributes:
        measures: whether it also observes the runs of a single rank.
        compared_options: options that ranks compare, too, before they train together.
    """

    @property
    def measures(self) -> bool: ...

    @property
    def compared_options(self) -> tuple[str, ...]: ...

    def __call__(
        self, original: Any, session: Any, run: PreparedRun, carry_out: Callable[[Any], Any]
    ) -> Any: ...


def run(
    observer: Observer,
    original: Any,
    session: Any,
    fetches: Any,
    leaves: list[Any],
    feed_dict: Any,
    options: Any,
    run_metadata: Any,
) -> Any:
    """Replaces `Session.run`: ranks run shared operations together; everything else runs unchanged.

    Args:
        observer: carries training runs out.
        original: `Session.run`; the other arguments are its own, and
        leaves: those of `fetches`.
    """
    context = context_of(session)
    PREEMPTION.watch()
    is_plain = context.is_plain and not (observer.measures or context.reads.wholes)
    if is_plain and context.counted.counter is None:
        if PREEMPTION.is_told:
            _stop_plain_run(context, leaves, feed_dict)
        note_run(session)
        return original(session, fetches, feed_dict, options, run_metadata)
    rewritten = context.extended.extension.rewrite_fetches(fetches)
    if rewritten is None and context.reads.wholes:
        rewritten = reduced_reads.rewrite_fetches(context.graph, fetches)
    if rewritten is not None:
        fetches, leaves = rewritten.fetches, graph_analysis.flatten(rewritten.fetches)
        values = run(observer, original, session, fetches, leaves, feed_dict, options, run_metadata)
        return rewritten.restore(values)
    prepared = prepared_run(context, leaves, list(feed_dict or {}), observer.compared_options)
    if prepared is None:
        return original(session, fetches, feed_dict, options, run_metadata)
    note_run(session)
    PREEMPTION.stop(context.state, prepared.footprint)
    own_feeds = prepared.feeds
    if context.flag.tensor is not None and prepared.footprint.trains:
        own_feeds = {context.flag.tensor.name: True, **own_feeds}
    feeds = {**(feed_dict or {}), **own_feeds} if own_feeds else feed_dict

    def run_alone(original: Any, feeds: dict[Any, Any] | None = feeds) -> Any:
        if not prepared.extra_operations:
            return original(session, fetches, feeds, options, run_metadata)
        fetches_and_more = [fetches, prepared.extra_operations]
        return original(session, fetches_and_more, feeds, options, run_metadata)[0]

    def run_extended(original: Any) -> Any:
        state = context.state
        if state.part is NO_PART:
            state.refuse_if_left()
            state.part = context.extended.extension.join_alone(session)
        script_feeds, footprint = feeds or {}, prepared.footprint
        fed = state.part.feeds(footprint.trains, False, script_feeds, prepared.description)
        try:
            return run_alone(original, {**script_feeds, **fed})
        except tf.errors.OpError:
            raise
        except Exception:
            state.part.run_never_started(fed)
            raise
        except BaseException:
            # This program is told to end.
            state.part.abandon()
            raise

    def run_together(original: Any) -> Any:
        return coordinator.instance().run(
            original, session, prepared, fetches, feeds, options, run_metadata
        )

    with batch_counter.followed(session, prepared) if prepared.counted else _FOLLOWS_NOTHING:
        if is_plain:
            values = run_alone(original)
        elif context.ranks == 1:
            extension = context.extended.extension
            if prepared.extended:
                values = observer(original, session, prepared, run_extended)
            else:
                if extension.reads_iterator_started_by(prepared.footprint.operations):
                    context.state.part.iterator_restarts()
                values = observer(original, session, prepared, run_alone)
        elif _needs_peers(context, session, prepared):
            values = observer(original, session, prepared, run_together)
        else:
            values = run_alone(original)
    if prepared.is_step:
        milestones.poster().trained()
    return values


def _needs_peers(context: RunContext, session: Any, prepared: PreparedRun) -> bool:
    """Tells whether all of several ranks must carry a run out together."""
    footprint = prepared.footprint
    if not context.is_shared:
        # If an optimizer is added later, variables that are initialized now are made equal then.
        context.state.unequal_variables.update({v.name: v for v in footprint.initialized})
        return False
    if context.extended.extension.reads_iterator_started_by(footprint.operations):
        coordinator.instance().restart(session)
    return prepared.needs_peers


def _stop_plain_run(context: RunContext, leaves: list[Any], feed_dict: Any) -> None:
    """Refuses a run of TensorFlow's alone if this process was told to stop."""
    try:
        footprint = run_analysis.footprint_of(context.graph, leaves, list(feed_dict or {}))
    except Exception:
        return  # TensorFlow refuses the fetches or feeds itself
    PREEMPTION.stop(context.state, footprint)


def make_callable(
    original: Any, session: Any, fetches: Any, feed_list: Any = None, accept_options: bool = False
) -> Any:
    """Replaces `Session.make_callable`: the callable calls `run`.

    If the library changes nothing in a graph's runs, it returns TensorFlow's callable.
    """
    if context_of(session).is_plain:
        return original(session, fetches, feed_list, accept_options)

    def call(*values: Any, options: Any = None, run_metadata: Any = None) -> Any:
        return session.run(fetches, dict(zip(feed_list or [], values)), options, run_metadata)

    return call


def make_callable_from_options(original: Any, session: Any, options: Any) -> Any:
    """Stands in for `Session._make_callable_from_options`: the callable is a `run`, too.

    Keras fits, evaluates and predicts by it in a graph.
    """
    if context_of(session).is_plain:
        return original(session, options)
    fetches, connections = list(options.fetch), list(options.tensor_connection)

    def call(*values: Any, run_metadata: Any = None) -> Any:
        feeds = dict(zip(options.feed, values))
        if connections:
            # For example a dataset's next batch instead of a placeholder.
            batch = session.run([x.from_tensor for x in connections])
            feeds.update(zip((x.to_tensor for x in connections), batch))
        results = session.run([*fetches, *options.target], feeds, options.run_options, run_metadata)
        return results[: len(fetches)]

    return call


def partial_run_setup(original: Any, session: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `Session.partial_run_setup`: refuses it if ranks agree on runs."""
    if collectives.size() > 1 and gates_of(session.graph).gates:
        raise NotImplementedError(
            "partial_run is not possible with several ranks, which agree on whole runs: use run()."
        )
    return original(session, *args, **kwargs)
