"""Stands in for the methods of TensorFlow's sessions inside scope() (see `patches`).

`original` is always the method itself. A run that uses no collective, and every run with one rank,
goes straight to it.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from typing import Any, Callable, Protocol

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.coordination import (
    agreement,
    barrier,
    batch_counter,
    common_folder,
    coordinator,
    milestones,
    reduced_reads,
    run_analysis,
)
from collective.coordination.initial_broadcast import broadcast_initial_values
from collective.coordination.preemption import PREEMPTION
from collective.coordination.prepared_run import PreparedRun
from collective.coordination.run_analysis import RunFootprint, is_shared
from collective.coordination.run_extension import RunExtension, extension_of
from collective.coordination.session_state import note_run, state_of_session
from collective.ops.communication import collectives, membership
from collective.ops.communication.gate import GraphGates, gates_of
from collective.ops.graph import graph_analysis, graphs, training_flag
from collective.ops.placement import TENSORFLOW_SHARE, chosen
from collective.ops.rows import file_systems
from collective.strategies.grouped_exchange import groups_of
from collective.tables.policies import next_step
from collective.tables.table import Sharded, is_replicated
from collective.tensorflow_internals.graphs import context


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
    feed_dict: Any = None,
    options: Any = None,
    run_metadata: Any = None,
) -> Any:
    """Replaces `Session.run`: ranks run shared operations together; everything else runs unchanged.

    Args:
        observer: carries training runs out.
        original: `Session.run`; the other arguments are its own.
    """
    graph = session.graph
    flag = training_flag.existing(graph)
    PREEMPTION.watch()
    is_plain = _is_plain(graph) and not observer.measures
    if is_plain and batch_counter.counter_of(graph) is None:
        if PREEMPTION.is_told:
            _stop_plain_run(session, fetches, feed_dict)
        return original(session, fetches, feed_dict, options, run_metadata)
    extension = extension_of(graph)
    rewritten = extension.rewrite_fetches(fetches)
    if rewritten is None:
        rewritten = reduced_reads.rewrite_fetches(graph, fetches)
    if rewritten is not None:
        values = run(
            observer, original, session, rewritten.fetches, feed_dict, options, run_metadata
        )
        return rewritten.restore(values)
    prepared = _prepared_run(session, fetches, feed_dict, observer.compared_options)
    if prepared is None:
        return original(session, fetches, feed_dict, options, run_metadata)
    footprint = prepared.footprint
    note_run(session)
    PREEMPTION.stop(state_of_session(session), footprint)
    feeds = _with_feeds(footprint, flag, feed_dict)

    def run_alone(original: Any) -> Any:
        if not prepared.beside:
            return original(session, fetches, feeds, options, run_metadata)
        fetches_and_more = [fetches, prepared.beside]
        return original(session, fetches_and_more, feeds, options, run_metadata)[0]

    def run_together(original: Any) -> Any:
        return coordinator.instance().run(
            original, session, prepared, fetches, feeds, options, run_metadata
        )

    with batch_counter.followed(session, prepared):
        if is_plain:
            values = run_alone(original)
        elif collectives.size() == 1:
            values = observer(original, session, prepared, run_alone)
        else:
            values = _run_of_several(
                observer, original, session, prepared, extension, run_alone, run_together
            )
    if prepared.is_step:
        milestones.poster().trained()
    return values


def _run_of_several(
    observer: Observer,
    original: Any,
    session: Any,
    prepared: PreparedRun,
    extension: RunExtension,
    run_alone: Callable[[Any], Any],
    run_together: Callable[[Any], Any],
) -> Any:
    """Executes a run on several ranks."""
    graph, footprint = session.graph, prepared.footprint
    if not is_shared(graph):
        # If an optimizer is added later, variables that are initialized now are made equal then.
        unequal = state_of_session(session).unequal_variables
        unequal.update({v.name: v for v in footprint.initialized})
        return run_alone(original)
    if extension_of(graph).reads_iterator_started_by(footprint.operations):
        coordinator.instance().restart(session)
    if not prepared.needs_peers:
        return run_alone(original)
    return observer(original, session, prepared, run_together)


def _stop_plain_run(session: Any, fetches: Any, feed_dict: Any) -> None:
    """Refuses a run of TensorFlow's alone if this process was told to stop."""
    try:
        footprint = run_analysis.footprint_of(
            session.graph, graph_analysis.flatten(fetches), list(feed_dict or {})
        )
    except Exception:
        return  # TensorFlow refuses the fetches or feeds itself
    PREEMPTION.stop(state_of_session(session), footprint)


def _is_plain(graph: tf.Graph) -> bool:
    """Tells whether the library changes nothing in the runs of `graph`.

    That is the case on one rank, if the graph has no dynamic table and no group of lookups.
    """
    return (
        collectives.size() == 1 and training_flag.existing(graph) is None and not groups_of(graph)
    )


def _with_feeds(footprint: RunFootprint, flag: Any, feed_dict: Any) -> Any:
    """Returns `feed_dict` with the library's own feeds of a run, also on one rank.

    Args:
        footprint: what the run executes.
        flag: the graph's training flag, if it has one.
        feed_dict: the script's feeds.
    """
    feeds: dict[Any, Any] = {}
    if flag is not None and footprint.trains:
        feeds[flag.name] = True
    feeds.update((x.name, value) for x, value in footprint.empty_feeds)
    return {**(feed_dict or {}), **feeds} if feeds else feed_dict


def make_callable(
    original: Any, session: Any, fetches: Any, feed_list: Any = None, accept_options: bool = False
) -> Any:
    """Replaces `Session.make_callable`: the callable calls `run`.

    If the library changes nothing in a graph's runs, it returns TensorFlow's callable.
    """
    if _is_plain(session.graph):
        return original(session, fetches, feed_list, accept_options)

    def call(*values: Any, options: Any = None, run_metadata: Any = None) -> Any:
        return session.run(fetches, dict(zip(feed_list or [], values)), options, run_metadata)

    return call


def make_callable_from_options(original: Any, session: Any, options: Any) -> Any:
    """Stands in for `Session._make_callable_from_options`: the callable is a `run`, too.

    Keras fits, evaluates and predicts by it in a graph.
    """
    if _is_plain(session.graph):
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


def prepare_session(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `SessionManager.prepare_session`: makes replicated variables equal.

    An init_fn may have given them values of its own.
    """
    session = original(manager, *args, **kwargs)
    graph = session.graph
    if collectives.size() == 1 or not is_shared(graph):
        return session
    has_init_fn = {"init_fn": kwargs.get("init_fn") is not None}
    payloads = barrier.exchange(session, "what a session starts from", has_init_fn)
    if any(payload["init_fn"] for payload in payloads):
        variables = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
        replicated = [v for v in variables if is_replicated(v)]
        broadcast_initial_values(type(session).run, session, replicated)
    return session


def with_own_gpu(
    original: Any, session: Any, target: str = "", graph: Any = None, config: Any = None
) -> None:
    """Stands in for `Session.__init__`: a process of several on a host sees one GPU.

    The GPU's memory is allocated as needed, and some of it is left to CUDA's libraries.
    """
    if config is None:
        # The settings of `tf.config`, which name all GPUs that the process may see.
        merged = tf.ConfigProto()
        merged.CopyFrom(context.context().config)
        merged.gpu_options.MergeFrom(_options_of_own_gpu(merged.gpu_options))
        config = merged
    elif isinstance(config, tf.ConfigProto):
        # Its bytes: a script of another framework may bring what stands for a message.
        asked = tf.ConfigProto.FromString(config.SerializeToString())
        config = tf.ConfigProto(gpu_options=_options_of_own_gpu(asked.gpu_options))
        config.MergeFrom(asked)
    state_of_session(session).handled_error = id(sys.exc_info()[1])
    original(session, target, graph, config)


def _options_of_own_gpu(asked: tf.GPUOptions) -> tf.GPUOptions:
    """Returns the options by which a session takes its rank's GPU, in addition to those that are
    `asked`.

    TensorFlow allows no share of a GPU's memory together with limits of virtual devices.
    """
    options = tf.GPUOptions(allow_growth=True)
    if chosen() == "gpu" and not asked.experimental.virtual_devices:
        options.per_process_gpu_memory_fraction = TENSORFLOW_SHARE
    if collectives.size() > 1 and len(tf2.config.list_physical_devices("GPU")) > 1:
        options.visible_device_list = str(membership.local_rank())
    return options


def without_agreement(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes a `MonitoredTrainingSession`: each of several ranks is its own process's chief.

    That holds whatever the script says about rank 0. (A worker would wait for a chief to initialize
    variables that they don't share.) All ranks use rank 0's checkpoint_dir.

    Raises:
        RuntimeError: it is called eagerly: there is no graph to run.
        ValueError: TensorFlow knows no file system for checkpoint_dir.
    """
    graphs.refuse_eager("scope()", "MonitoredTrainingSession is opened")
    names = ("master", "is_chief", "checkpoint_dir")
    arguments = {**dict(zip(names, args)), **kwargs, "is_chief": True}
    file_systems.check(arguments.get("checkpoint_dir"))
    if collectives.size() == 1:
        return original(*args, **kwargs)
    if is_shared(tf.get_default_graph()):
        arguments["checkpoint_dir"] = common_folder.settle(
            "making a MonitoredTrainingSession",
            "checkpoint_dir",
            arguments.get("checkpoint_dir"),
            stacklevel=4,
        )
    positional = [arguments.pop(name) for name in names[: len(args)]]
    return original(*positional, *args[3:], **arguments)


def wait_for_session(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `SessionManager.wait_for_session`: refuses it with several ranks.

    It waits for a chief to initialize variables, which this process doesn't share.
    """
    if collectives.size() == 1:
        return original(manager, *args, **kwargs)
    raise NotImplementedError(
        "A worker waits for a chief to initialize its variables, but each rank has its own. "
        "Use tf.train.MonitoredTrainingSession, or ChiefSessionCreator on every rank."
    )


def supervise(original: Any, supervisor: Any, *args: Any, **kwargs: Any) -> None:
    """Stands in for `Supervisor.__init__`: refuses it with several ranks.

    Its threads save and summarize by each rank's own clock.
    """
    if collectives.size() == 1:
        return original(supervisor, *args, **kwargs)
    raise NotImplementedError(
        "tf.train.Supervisor saves and summarizes in threads, by each rank's own clock, but ranks "
        "must do so together. Use tf.train.MonitoredTrainingSession."
    )


def _prepared_run(
    session: Any, fetches: Any, feed_dict: Any, compared: tuple[str, ...]
) -> PreparedRun | None:
    """Returns the run for these fetches and feeds, prepared when it is first asked for.

    Args:
        session: the session.
        fetches: the script's fetches.
        feed_dict: the script's feeds.
        compared: names that ranks compare, too, if the run trains.

    Returns:
        None if TensorFlow would refuse the fetches or feeds; it then does so itself.
    """
    graph = session.graph
    leaves, fed = graph_analysis.flatten(fetches), list(feed_dict or {})
    prepared_runs = state_of_session(session).prepared_runs
    key = (
        tuple(map(_identity, leaves)),
        tuple(map(_identity, fed)),
        len(gates_of(graph).gates),
        len(groups_of(graph)),
        reduced_reads.reads_of(graph).refusals,
        compared,
    )
    if key not in prepared_runs:
        with graphs.by_one_thread:
            try:
                footprint = run_analysis.footprint_of(graph, leaves, fed)
            except Exception:
                return None
            _refuse_shards(graph, leaves)
            reduced_reads.refuse(graph, footprint.operations, leaves)
            if footprint.is_step:
                next_step.check(graph, footprint.operations)
            if footprint.trains:
                footprint = footprint.comparing(compared)
            counted = batch_counter.counted_run(graph, footprint.operations, leaves, fed)
            run = _prepare(graph, footprint, (leaves, fed))
            run.counted = counted
            prepared_runs[key] = run
    prepared: PreparedRun = prepared_runs[key]
    return prepared


def _refuse_shards(graph: tf.Graph, leaves: list[Any]) -> None:
    """Refuses fetches that read a table's resource, by its name or by hand: it is a shard."""
    tables = {
        v.handle.op: v
        for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
        if isinstance(v, Sharded)
        and (v.rows is None or collectives.size() > 1 and not v.shows_shard)
    }
    for leaf in leaves:
        op = graph.as_graph_element(leaf)
        op = op if isinstance(op, tf.Operation) else op.op
        if op.type == "ReadVariableOp" and op.inputs[0].op in tables:
            tables[op.inputs[0].op].refuse("Fetching the value")


def _identity(leaf: Any) -> Any:
    return leaf if isinstance(leaf, str) else id(leaf)


def _prepare(graph: tf.Graph, footprint: RunFootprint, keep_alive: Any) -> PreparedRun:
    """Prepares a run: adds to the graph the agreements that open its gates."""
    gates = gates_of(graph)
    extended = extension_of(graph).takes_part_in(footprint.operations)
    run = PreparedRun(footprint, keep_alive, extended=extended)
    run.is_step = footprint.is_step and not footprint.restores
    run.kept = footprint.taking_nothing()
    awaited = run_analysis.beside_gradients(gates, footprint.operations)
    with graphs.open_for_changes(graph):
        for level in footprint.levels(gates):
            run.targets.append(_agreement(graph, gates, run, level, awaited))
            run.tickets.append(gates.gates[level - 1].ticket)
            run.gate = run.gate or gates.gates[level - 1]
        # The graph optimizer drops an exchange whose result isn't used, but not one that is
        # awaited.
        run.targets += awaited
        run.idle_run = footprint.idle_run(gates) if collectives.size() > 1 else None
        if run.idle_run and run.targets:
            # The graph optimizer drops an exchange whose result isn't used, but not on a rank that
            # answers it.
            run.targets += run.idle_run.operations
        if run.idle_run:
            run.idle_targets = [
                _idle_agreement(gates, run, level) for level in footprint.levels(gates)[1:]
            ]
    return run


def _agreement(
    graph: tf.Graph,
    gates: GraphGates,
    run: PreparedRun,
    level: int,
    awaited: Sequence[tf.Operation],
) -> tf.Tensor:
    """Makes the agreement that opens the gate of `level`.

    Args:
        graph: the graph.
        gates: its gates.
        run: the run.
        level: the gate's level.
        awaited: exchanges of rows that the run's gradients wait for.
    """
    first = run.gate is None
    checks = run.footprint.checks(gates, level, first)
    if first:
        prerequisites = run.footprint.sources(gates)
        run.repeatable = not prerequisites
        prerequisites += run_analysis.awaiting(awaited)
    else:
        prerequisites = run.footprint.exchanges_below(gates, level)
    return agreement.agree(
        gates.gates[level - 1],
        {gates.checks.index(check): check for check in checks},
        prerequisites,
        functools.partial(run.refused, first=first),
        first,
        extension_of(graph).when_agreed if first and run.extended else tf.no_op,
    )


def _idle_agreement(gates: GraphGates, run: PreparedRun, level: int) -> tf.Tensor:
    """Makes the agreement that opens the gate of `level`, for a rank that answers its peers."""
    assert run.idle_run is not None
    below = run.footprint.exchanges_below(gates, level)
    return agreement.agree(
        gates.gates[level - 1],
        {},
        [op for op in below if op in run.idle_run.operations],
        functools.partial(run.refused, first=False),
        first=False,
    )


class Clock:
    """Stands in for the module `time`: `time()` is rank 0's."""

    def time(self) -> float:
        """Returns seconds since 1970 on rank 0, as of the last agreement."""
        agreed = None
        if collectives.size() > 1 and coordinator.started():
            agreed = coordinator.instance().clock
        return time.time() if agreed is None else agreed

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
