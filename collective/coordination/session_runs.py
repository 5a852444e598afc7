"""What stands in for the methods of TensorFlow's sessions inside scope() (see
`collective.patches`).

`original` is always the method itself. A run that uses no collective, and every run with one rank,
goes straight to it.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any, Callable, Protocol

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.coordination import agreement, barrier, coordinator, run_analysis
from collective.coordination.agreement import Header
from collective.coordination.initial_broadcast import make_equal
from collective.coordination.prepared_run import PreparedRun
from collective.coordination.run_extension import extension_of
from collective.coordination.session_state import state_of_session
from collective.ops import collectives, graph_analysis, graphs, training_flag
from collective.ops.gate import gates_of
from collective.ops.placement import chosen, memory_shares
from collective.strategies.grouped_exchange import groups_of
from collective.tables.table import Sharded, Table, is_replicated


class Observer(Protocol):
    """Sees training runs carried out (`collective.monitoring.run_observer`).

    Attributes:
        measures: whether it wants to see the runs of one rank, too.
        alike: names that all ranks must have alike before they train together.
    """

    @property
    def measures(self) -> bool: ...

    @property
    def alike(self) -> tuple[str, ...]: ...

    def __call__(
        self, original: Any, session: Any, run: PreparedRun, carry_out: Callable[[Any], Any]
    ) -> Any: ...


def run(
    observer: Observer,
    original: Any,
    session: Any,
    fetches: Any,
    feed_dict: Any = None,
    options: Any = None,
    run_metadata: Any = None,
) -> Any:
    """`Session.run`."""
    flag = training_flag.existing(session.graph)
    if _is_plain(session.graph) and not observer.measures:
        return original(session, fetches, feed_dict, options, run_metadata)
    extension = extension_of(session.graph)
    rewritten = extension.rewrite_fetches(fetches)
    if rewritten is not None:
        values = run(
            observer, original, session, rewritten.fetches, feed_dict, options, run_metadata
        )
        return rewritten.restore(values)
    prepared = _prepare(session, fetches, feed_dict, observer.alike)
    if flag is not None and prepared is not None and prepared.footprint.trains:
        feed_dict = {**(feed_dict or {}), flag.name: True}
    if prepared is not None and prepared.footprint.nothing:
        feed_dict = {
            **(feed_dict or {}),
            **{x.name: nothing for x, nothing in prepared.footprint.nothing},
        }
    if collectives.size() == 1:

        def run_here(original: Any) -> Any:
            return original(session, fetches, feed_dict, options, run_metadata)

        return (
            run_here(original)
            if prepared is None
            else observer(original, session, prepared, run_here)
        )
    if not (gates_of(session.graph).gates or _has_tables(session.graph)):
        # Nothing is shared yet. If an optimizer comes later, what was initialized here is made
        # equal then.
        if prepared is not None and prepared.footprint.initialized:
            state_of_session(session).unequal_variables.update(
                {v.name: v for v in prepared.footprint.initialized}
            )
        return original(session, fetches, feed_dict, options, run_metadata)
    if prepared is not None and extension.reads_iterator_started_by(prepared.footprint.operations):
        coordinator.of_process().restart(session)
    if prepared is None or not (
        prepared.targets or prepared.footprint.initialized or prepared.extended
    ):
        return original(session, fetches, feed_dict, options, run_metadata)

    def run_together(original: Any) -> Any:
        return coordinator.of_process().run(
            original, session, prepared, fetches, feed_dict, options, run_metadata
        )

    return observer(original, session, prepared, run_together)


def _is_plain(graph: tf.Graph) -> bool:
    """Whether the runs of `graph` are TensorFlow's alone: with one rank, if it has no dynamic table
    and no group of lookups.
    """
    return (
        collectives.size() == 1 and training_flag.existing(graph) is None and not groups_of(graph)
    )


def make_callable(
    original: Any, session: Any, fetches: Any, feed_list: Any = None, accept_options: bool = False
) -> Any:
    """`Session.make_callable`: where a graph's runs aren't TensorFlow's alone, a plain `run` in
    disguise.
    """
    if _is_plain(session.graph):
        return original(session, fetches, feed_list, accept_options)

    def call(*feeds: Any, options: Any = None, run_metadata: Any = None) -> Any:
        return session.run(fetches, dict(zip(feed_list or [], feeds)), options, run_metadata)

    return call


def make_callable_from_options(original: Any, session: Any, options: Any) -> Any:
    """`Session._make_callable_from_options`, by which Keras fits, evaluates and predicts in a
    graph: a plain `run`, too.
    """
    if _is_plain(session.graph):
        return original(session, options)
    fetches, connected = list(options.fetch), list(options.tensor_connection)

    def call(*feeds: Any, run_metadata: Any = None) -> Any:
        given = dict(zip(options.feed, feeds))
        if connected:  # a dataset's next batch, say, in the place of a placeholder
            given.update(
                zip(
                    (x.to_tensor for x in connected),
                    session.run([x.from_tensor for x in connected]),
                )
            )
        values = session.run([*fetches, *options.target], given, options.run_options, run_metadata)
        return values[: len(fetches)]

    return call


def partial_run_setup(original: Any, session: Any, *args: Any, **kwargs: Any) -> Any:
    """`Session.partial_run_setup`."""
    if collectives.size() > 1 and gates_of(session.graph).gates:
        raise NotImplementedError(
            "partial_run is not possible with several ranks, which agree on whole runs: use run()."
        )
    return original(session, *args, **kwargs)


def close(original: Any, session: Any) -> None:
    """`Session.close`, which a `with` statement of a monitored session or a `finally` may call for
    an error.
    """
    if coordinator.started():
        coordinator.of_process().leave(session, _since(session))
    original(session)


def _since(session: Any) -> BaseException | None:
    """The error that is being handled now, if it wasn't when `session` was made: in an `except`,
    for a first start say.
    """
    error = sys.exc_info()[1]
    return None if id(error) == state_of_session(session).handled_error else error


def leave(original: Any, session: Any, kind: Any, error: Any, traceback: Any) -> Any:
    """`Session.__exit__`, which closes the session in a thread that knows nothing of the error."""
    if coordinator.started():
        coordinator.of_process().leave(session, error)
    return original(session, kind, error, traceback)


def end(original: Any, session: Any, exception_type: Any = None) -> None:
    """`_MonitoredSession._close_internal`: hooks that run something at the end do so on all ranks
    together.
    """
    at_end = session._coordinated_creator.tf_sess
    error = exception_type or _since(at_end)  # in a `finally`
    if (
        (error is None or coordinator.is_end(error))
        and at_end is not None
        and coordinator.started()
    ):
        try:
            coordinator.of_process().end(at_end)
        except BaseException as error:
            original(session, type(error))
            raise
    original(session, exception_type)


def prepare_session(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """`SessionManager.prepare_session`: an init_fn may have given variables values of its own."""
    session = original(manager, *args, **kwargs)
    if collectives.size() == 1 or not (gates_of(session.graph).gates or _has_tables(session.graph)):
        return session
    given = barrier.exchange(
        session, "what a session starts from", {"init_fn": kwargs.get("init_fn") is not None}
    )
    if any(text["init_fn"] for text in given):
        make_equal(
            type(session).run,
            session,
            [
                v
                for v in session.graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
                if is_replicated(v)
            ],
        )
    return session


def with_own_gpu(
    original: Any, session: Any, target: str = "", graph: Any = None, config: Any = None
) -> None:
    """`Session.__init__`: memory of the GPU is taken as it is needed, some is left to kernels; and
    a process of several on a host sees one GPU.
    """
    ours = tf.ConfigProto()
    ours.gpu_options.allow_growth = True
    if chosen() == "gpu":
        ours.gpu_options.per_process_gpu_memory_fraction = memory_shares()[1]
    if collectives.size() > 1 and len(tf2.config.list_physical_devices("GPU")) > 1:
        ours.gpu_options.visible_device_list = str(collectives.local_rank())
    if isinstance(config, tf.ConfigProto):
        ours.MergeFrom(config)
        config = ours
    state_of_session(session).handled_error = id(sys.exc_info()[1])
    original(session, target, graph, ours if config is None else config)


def every_rank_for_itself(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`MonitoredTrainingSession`: with several ranks each is the chief of its own process, whatever
    the script says of rank 0.

    (A worker would wait for a chief to initialize variables that it doesn't share with it.)
    """
    if collectives.size() == 1:
        return original(*args, **kwargs)
    given = {**dict(zip(("master", "is_chief", "checkpoint_dir"), args)), **kwargs}
    given["is_chief"] = True
    return original(
        *[given.pop(name) for name in ("master", "is_chief", "checkpoint_dir")[: len(args)]],
        *args[3:],
        **given,
    )


def wait_for_session(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """`SessionManager.wait_for_session`, for a chief to initialize what this process would then
    see.
    """
    if collectives.size() == 1:
        return original(manager, *args, **kwargs)
    raise NotImplementedError(
        "A worker waits for a chief to initialize its variables, which "
        "several ranks have each for "
        "itself. Use tf.train.MonitoredTrainingSession, or "
        "ChiefSessionCreator on every rank."
    )


def supervise(original: Any, supervisor: Any, *args: Any, **kwargs: Any) -> None:
    """`Supervisor.__init__`, whose threads save and summarize by each rank's own clock."""
    if collectives.size() == 1:
        return original(supervisor, *args, **kwargs)
    raise NotImplementedError(
        "tf.train.Supervisor saves and summarizes in threads, whenever it "
        "is time on a rank, which its "
        "peers would have to do with it. Use "
        "tf.train.MonitoredTrainingSession."
    )


def _has_tables(graph: tf.Graph) -> bool:
    return any(
        isinstance(v, Table) for v in graph.get_collection_ref(tf.GraphKeys.GLOBAL_VARIABLES)
    )


def _prepare(
    session: Any, fetches: Any, feed_dict: Any, alike: tuple[str, ...]
) -> PreparedRun | None:
    """The `Run` for these fetches and feeds; None if TensorFlow would refuse them, which it then
    does itself.

    If it trains, the ranks compare the names `alike`, too.
    """
    leaves, fed = graph_analysis.flatten(fetches), list(feed_dict or {})
    cache = state_of_session(session).prepared_runs
    gates = gates_of(session.graph)
    key = (
        tuple(map(_identity, leaves)),
        tuple(map(_identity, fed)),
        len(gates.gates),
        len(groups_of(session.graph)),
        alike,
    )
    if key not in cache:
        try:
            footprint = run_analysis.footprint_of(session.graph, leaves, fed)
        except Exception:
            return None
        _refuse_shards(session.graph, leaves)
        cache[key] = _plan(
            session.graph, footprint.alike(alike) if footprint.trains else footprint, (leaves, fed)
        )
    prepared: PreparedRun = cache[key]
    return prepared


def _refuse_shards(graph: tf.Graph, leaves: list[Any]) -> None:
    """A read of a table's resource, fetched by its name or made by hand, is a read of one shard."""
    tables = {
        v.handle.op: v
        for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
        if isinstance(v, Sharded) and (collectives.size() > 1 or v.rows is None)
    }
    for leaf in leaves:
        op = graph.as_graph_element(leaf)
        op = op if isinstance(op, tf.Operation) else op.op
        if op.type == "ReadVariableOp" and op.inputs[0].op in tables:
            tables[op.inputs[0].op].refuse("Fetching the value")


def _identity(leaf: Any) -> Any:
    return leaf if isinstance(leaf, str) else id(leaf)


def _plan(graph: tf.Graph, footprint: run_analysis.RunFootprint, keep: Any) -> PreparedRun:
    gates = gates_of(graph)
    extension = extension_of(graph)
    out = PreparedRun(footprint, keep, extended=extension.takes_part_in(footprint.operations))

    def disagreed(first: bool, headers: list[Header]) -> None:
        out.disagreement, out.begun = headers, not first

    with graphs.open_for_changes(graph):
        for level in footprint.levels(gates):
            first = out.gate is None
            checks = footprint.checks(gates, level, first)
            after = footprint.sources(gates) if first else footprint.exchanged_below(gates, level)
            out.repeatable = out.repeatable and not (first and after)
            numbered = {gates.checks.index(check): check for check in checks}
            out.targets.append(
                agreement.agree(
                    gates.gates[level - 1],
                    numbered,
                    after,
                    functools.partial(disagreed, first),
                    first,
                    extension.when_agreed if first and out.extended else tf.no_op,
                )
            )
            out.tickets.append(gates.gates[level - 1].ticket)
            out.gate = out.gate or gates.gates[level - 1]
        out.answer = footprint.answer(gates) if collectives.size() > 1 else None
        if out.answer and out.targets:
            # The graph optimizer drops an exchange of which nothing is looked at, but not where a
            # rank answers it.
            out.targets += out.answer.operations
        for level in footprint.levels(gates)[1:] if out.answer else []:
            out.answering.append(
                agreement.agree(
                    gates.gates[level - 1],
                    {},
                    footprint.exchanged_below(gates, level),
                    functools.partial(disagreed, False),
                    first=False,
                )
            )
    return out


class Clock:
    """Stands in for the module `time`; only `time()` is another."""

    def time(self) -> float:
        """Seconds since 1970 on rank 0."""
        agreed = (
            coordinator.of_process().clock
            if collectives.size() > 1 and coordinator.started()
            else None
        )
        return time.time() if agreed is None else agreed

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
