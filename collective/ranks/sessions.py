"""What stands in for the methods of TensorFlow's sessions inside scope() (see
`collective.patches`).

`original` is always the method itself. A run that uses no collective, and every run with one rank,
goes straight to it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2
from tensorflow.python.client import session as session_lib

from collective.ops import communication, graphs, training
from collective.ops.gate import gates_of
from collective.ops.operations import chosen, memory_shares
from collective.prefetch.cut import Cut, cut_of, follow
from collective.ranks import agreement, calls, meeting, protocol, runs
from collective.ranks.agreement import Header
from collective.ranks.shared import Run
from collective.replicated import is_replicated, make_equal
from collective.strategies.together import groups_of
from collective.tables.table import Sharded, Table
from collective.watching import Watch


def run(
    watch: Watch,
    original: Any,
    session: Any,
    fetches: Any,
    feed_dict: Any = None,
    options: Any = None,
    run_metadata: Any = None,
) -> Any:
    """`Session.run`."""
    flag = training.existing(session.graph)
    if _is_plain(session.graph) and watch.profiler is None:
        return original(session, fetches, feed_dict, options, run_metadata)
    cut = cut_of(session.graph)
    if cut is not None:
        behind = _behind(cut, fetches)
        if behind is not None:
            values = run(watch, original, session, behind.fetches, feed_dict, options, run_metadata)
            return behind.mapper.build_results(values)
    prepared = _prepare(session, fetches, feed_dict, watch.alike)
    if flag is not None and prepared is not None and prepared.reach.trains:
        feed_dict = {**(feed_dict or {}), flag.name: True}
    if prepared is not None and prepared.reach.nothing:
        feed_dict = {
            **(feed_dict or {}),
            **{x.name: nothing for x, nothing in prepared.reach.nothing},
        }
    if communication.size() == 1:

        def run_here(original: Any) -> Any:
            return original(session, fetches, feed_dict, options, run_metadata)

        return (
            run_here(original) if prepared is None else watch(original, session, prepared, run_here)
        )
    if not (gates_of(session.graph).gates or _has_tables(session.graph)):
        # Nothing is shared yet. If an optimizer comes later, what was initialized here is made
        # equal then.
        if prepared is not None and prepared.reach.initialized:
            session.__dict__.setdefault("_collective_unequal", {}).update(
                {v.name: v for v in prepared.reach.initialized}
            )
        return original(session, fetches, feed_dict, options, run_metadata)
    if prepared is not None and cut is not None and cut.restarts(prepared.reach.operations):
        protocol.of_process().restart(session)
    if prepared is None or not (prepared.targets or prepared.reach.initialized or prepared.cut):
        return original(session, fetches, feed_dict, options, run_metadata)

    def run_together(original: Any) -> Any:
        return protocol.of_process().run(
            original, session, prepared, fetches, feed_dict, options, run_metadata
        )

    return watch(original, session, prepared, run_together)


def _is_plain(graph: tf.Graph) -> bool:
    """Whether the runs of `graph` are TensorFlow's alone: with one rank, if it has no dynamic table
    and no group of lookups.
    """
    return communication.size() == 1 and training.existing(graph) is None and not groups_of(graph)


class _Behind(NamedTuple):
    """Fetches of a script of which some are known behind a cut (see `collective.prefetch`)."""

    mapper: Any
    fetches: list[Any]


def _behind(cut: Cut, fetches: Any) -> _Behind | None:
    """The fetches to run in the place of `fetches`; None if these can be run as they are, or not at
    all.
    """
    follow(cut)
    with cut.graph.as_default():
        try:
            mapper = session_lib._FetchMapper.for_fetch(fetches)
            wanted = mapper.unique_fetches()
            behind = [cut.stand_in(leaf) for leaf in wanted]
        except (TypeError, ValueError, KeyError):  # TensorFlow refuses them
            return None
    return _Behind(mapper, behind) if any(x is not y for x, y in zip(behind, wanted)) else None


def name_fetches(session: Any, fetches: Any) -> None:
    """Tables that are fetched as one value are looked up, before lookups are grouped and the run is
    read off the graph.
    """
    for leaf in runs.flatten(fetches):
        if isinstance(leaf, Sharded) and leaf.rows is not None:
            leaf.to_be_fetched()


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
    if communication.size() > 1 and gates_of(session.graph).gates:
        raise NotImplementedError(
            "partial_run is not possible with several ranks, which agree on whole runs: use run()."
        )
    return original(session, *args, **kwargs)


def close(original: Any, session: Any) -> None:
    """`Session.close`, which a `with` statement of a monitored session or a `finally` may call for
    an error.
    """
    if protocol.started():
        protocol.of_process().leave(session, _since(session))
    original(session)


def _since(session: Any) -> BaseException | None:
    """The error that is being handled now, if it wasn't when `session` was made: in an `except`,
    for a first start say.
    """
    error = sys.exc_info()[1]
    return None if id(error) == getattr(session, "_collective_handled", None) else error


def leave(original: Any, session: Any, kind: Any, error: Any, traceback: Any) -> Any:
    """`Session.__exit__`, which closes the session in a thread that knows nothing of the error."""
    if protocol.started():
        protocol.of_process().leave(session, error)
    return original(session, kind, error, traceback)


def end(original: Any, session: Any, exception_type: Any = None) -> None:
    """`_MonitoredSession._close_internal`: hooks that run something at the end do so on all ranks
    together.
    """
    at_end = session._coordinated_creator.tf_sess
    error = exception_type or _since(at_end)  # in a `finally`
    if (error is None or protocol.is_end(error)) and at_end is not None and protocol.started():
        try:
            protocol.of_process().end(at_end)
        except BaseException as error:
            original(session, type(error))
            raise
    original(session, exception_type)


def prepare_session(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """`SessionManager.prepare_session`: an init_fn may have given variables values of its own."""
    session = original(manager, *args, **kwargs)
    if communication.size() == 1 or not (
        gates_of(session.graph).gates or _has_tables(session.graph)
    ):
        return session
    given = meeting.exchange(
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
    if communication.size() > 1 and len(tf2.config.list_physical_devices("GPU")) > 1:
        ours.gpu_options.visible_device_list = str(communication.local_rank())
    if isinstance(config, tf.ConfigProto):
        ours.MergeFrom(config)
        config = ours
    session._collective_handled = id(sys.exc_info()[1])
    original(session, target, graph, ours if config is None else config)


def every_rank_for_itself(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`MonitoredTrainingSession`: with several ranks each is the chief of its own process, whatever
    the script says of rank 0.

    (A worker would wait for a chief to initialize variables that it doesn't share with it.)
    """
    if communication.size() == 1:
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
    if communication.size() == 1:
        return original(manager, *args, **kwargs)
    raise NotImplementedError(
        "A worker waits for a chief to initialize its variables, which "
        "several ranks have each for "
        "itself. Use tf.train.MonitoredTrainingSession, or "
        "ChiefSessionCreator on every rank."
    )


def supervise(original: Any, supervisor: Any, *args: Any, **kwargs: Any) -> None:
    """`Supervisor.__init__`, whose threads save and summarize by each rank's own clock."""
    if communication.size() == 1:
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


def _prepare(session: Any, fetches: Any, feed_dict: Any, alike: tuple[str, ...]) -> Run | None:
    """The `Run` for these fetches and feeds; None if TensorFlow would refuse them, which it then
    does itself.

    If it trains, the ranks compare the names `alike`, too.
    """
    leaves, fed = runs.flatten(fetches), list(feed_dict or {})
    cache = session.__dict__.setdefault("_collective_runs", {})
    gates = gates_of(session.graph)
    calls.separate(session.graph)
    key = (
        tuple(map(_identity, leaves)),
        tuple(map(_identity, fed)),
        len(gates.gates),
        len(groups_of(session.graph)),
        alike,
    )
    if key not in cache:
        try:
            reach = runs.reach(session.graph, leaves, fed)
        except Exception:
            return None
        _refuse_shards(session.graph, leaves)
        cache[key] = _plan(
            session.graph, reach.alike(alike) if reach.trains else reach, (leaves, fed)
        )
    prepared: Run = cache[key]
    return prepared


def _refuse_shards(graph: tf.Graph, leaves: list[Any]) -> None:
    """A read of a table's resource, fetched by its name or made by hand, is a read of one shard."""
    tables = {
        v.handle.op: v
        for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
        if isinstance(v, Sharded) and (communication.size() > 1 or v.rows is None)
    }
    for leaf in leaves:
        op = graph.as_graph_element(leaf)
        op = op if isinstance(op, tf.Operation) else op.op
        if op.type == "ReadVariableOp" and op.inputs[0].op in tables:
            tables[op.inputs[0].op].refuse("Fetching the value")


def _identity(leaf: Any) -> Any:
    return leaf if isinstance(leaf, str) else id(leaf)


def _plan(graph: tf.Graph, reach: runs.Reach, keep: Any) -> Run:
    gates = gates_of(graph)
    out, cut = Run(reach, keep), cut_of(graph)
    release = tf.no_op
    if cut is not None and cut.take in reach.operations:
        out.cut, release = cut, cut.release

    def disagreed(first: bool, headers: list[Header]) -> None:
        out.disagreement, out.begun = headers, not first

    with graphs.open_for_changes(graph):
        for level in reach.levels(gates):
            first = out.gate is None
            checks = reach.checks(gates, level, first)
            after = reach.sources(gates) if first else reach.exchanged_below(gates, level)
            out.repeatable = out.repeatable and not (first and after)
            numbered = {gates.checks.index(check): check for check in checks}
            out.targets.append(
                agreement.agree(
                    gates.gates[level - 1],
                    numbered,
                    after,
                    functools.partial(disagreed, first),
                    first,
                    release if first else tf.no_op,
                )
            )
            out.tickets.append(gates.gates[level - 1].ticket)
            out.gate = out.gate or gates.gates[level - 1]
        out.answer = reach.answer(gates) if communication.size() > 1 else None
        if out.answer and out.targets:
            # The graph optimizer drops an exchange of which nothing is looked at, but not where a
            # rank answers it.
            out.targets += out.answer.operations
        for level in reach.levels(gates)[1:] if out.answer else []:
            out.answering.append(
                agreement.agree(
                    gates.gates[level - 1],
                    {},
                    reach.exchanged_below(gates, level),
                    functools.partial(disagreed, False),
                    first=False,
                )
            )
    return out
