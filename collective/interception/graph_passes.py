"""Prepares graphs by passes, before gradients are taken or a session runs them.

A pass doesn't touch what it changed in an earlier call, or what a session has seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.coordination.reduced_reads import reads_of
from collective.gradients import rank_parts
from collective.ops import native_library
from collective.ops.communication import fused_reductions
from collective.ops.graph import (
    function_copies,
    graph_state,
)
from collective.options import ScopeOptions
from collective.prefetch import enable
from collective.replication import assignments, metric_reads
from collective.scope import SCOPES
from collective.tables.grouping import group_in_scope, group_traced, lookups_of
from collective.tables.policies import next_step
from collective.tables.table import Sharded, is_replicated_table
from collective.tables.updates import write_announcements
from collective.tables.updates.write_announcements import Announcements


@dataclasses.dataclass
class PreparedGraph:
    """Records for what a graph was last prepared.

    Attributes:
        state: its version, the options of scope(), and whether writes of tables are announced;
            None if it was never prepared.
    """

    state: tuple[int, ScopeOptions, bool] | None = None


def fetch_whole_tables(leaves: Iterable[Any]) -> None:
    """Looks up all rows of tables that are fetched as one value.

    It comes first, so that these lookups are grouped with the others. They are made in the order of
    the tables' names, because ranks may fetch in different orders.
    """
    tables = [leaf for leaf in leaves if isinstance(leaf, Sharded) and leaf.rows is not None]
    for table in sorted(tables, key=lambda table: str(table.op.name)):
        table.to_be_fetched()


def fetch_tables_by_name(graph: tf.Graph, leaves: Iterable[Any]) -> None:
    """Has a session fetch the values of tables that are fetched by their names, as 'user:0'.

    They are values of the script's variables where it has called `tf.disable_v2_behavior`; of a
    table, which is a resource variable, the name is that of its memory.

    Raises:
        TableError: a dynamic table is fetched so.
    """
    if tf.resource_variables_enabled():
        return  # Plain TensorFlow doesn't give values either.
    names = {leaf for leaf in leaves if isinstance(leaf, str)}
    names |= {x.name for x in leaves if isinstance(x, tf.Tensor) and x.dtype == tf.resource}
    if not names:
        return  # as in nearly every run
    variables = graph.get_collection_ref(tf.GraphKeys.GLOBAL_VARIABLES)
    found = [
        v
        for v in variables
        if (isinstance(v, Sharded) or is_replicated_table(v)) and v.handle.name in names
    ]
    wholes = reads_of(graph).wholes
    for table in sorted(found, key=lambda v: str(v.op.name)):
        if isinstance(table, Sharded):
            if table.rows is None:
                table.refuse("Fetching the value")
            table.to_be_fetched()
        wholes[table.handle.name] = table._as_graph_element()


def settle_gradient_parts(graph: tf.Graph, options: ScopeOptions) -> None:
    """Extends what a script computes from tables' gradients to all ranks.

    It comes before the assignments: a value that covers all ranks is the same on each.
    """
    rank_parts.settle(graph)


def reduce_metrics(graph: tf.Graph, options: ScopeOptions) -> None:
    """Makes reads of a metric's state return the state of all ranks.

    It comes before the assignments, which may depend on metrics.
    """
    metric_reads.reduce_reads(graph)


def sync_assignments(graph: tf.Graph, options: ScopeOptions) -> None:
    """Replaces rank-local values assigned to replicated variables by their means over ranks."""
    assignments.sync_assignments(graph)


def fuse_reductions(graph: tf.Graph, options: ScopeOptions) -> None:
    """Lets reductions over ranks share collectives.

    It comes after the passes that make operations return the values of all ranks.
    """
    fused_reductions.fuse(graph)


def copy_called_functions(graph: tf.Graph, options: ScopeOptions) -> None:
    """Gives each call of a function with collectives its own function.

    It comes after the assignments, whose exchanges may be in functions.
    """
    function_copies.separate(graph)


def group_lookups(
    graph: tf.Graph, options: ScopeOptions, ys: Any = None, xs: Iterable[Any] = ()
) -> None:
    """Lets lookups share exchanges.

    Args:
        graph: the graph.
        options: of scope().
        ys: if given, only the lookups that these tensors depend on.
        xs: the tensors with respect to which gradients are about to be taken.
    """
    if options.grouping and lookups_of(graph).groupable():
        group_in_scope(graph, options, ys, xs)


def prepare_traced(graph: tf.Graph) -> None:
    """Groups the lookups of a traced function so far, which have no exchange before.

    It is called before the function takes gradients, writes tables or branches, and at its end.
    """
    rank_parts.settle(graph)
    group_traced(graph)


def connect_step(graph: tf.Graph, options: ScopeOptions) -> None:
    """Gives lookups that were written before the global step its value."""
    next_step.connect(graph)


def prefetch_keys(graph: tf.Graph, options: ScopeOptions) -> None:
    """Splits the graph after the exchange of its groups' keys.

    It comes last: it needs the groups.
    """
    enable.split_if_wanted(graph, options.prefetch_keys)


def announce_writes(graph: tf.Graph, options: ScopeOptions) -> None:
    """Announces writes of tables and slots, if a consumer follows them.

    It comes last: the other passes may add operations that write.
    """
    if not options.checkpoint_blocking and native_library.missing() is None:
        write_announcements.want(graph)
    write_announcements.announce(graph)


# In the order in which they run.
PASSES: tuple[Callable[[tf.Graph, ScopeOptions], None], ...] = (
    settle_gradient_parts,
    reduce_metrics,
    sync_assignments,
    fuse_reductions,
    copy_called_functions,
    group_lookups,
    connect_step,
    prefetch_keys,
    announce_writes,
)


def prepare_run(graph: tf.Graph, options: ScopeOptions, leaves: Sequence[Any] = ()) -> None:
    """Prepares a graph that a session is about to run, once for each version of the graph.

    Args:
        graph: the session's graph.
        options: of scope().
        leaves: the fetches of the run, if they are known.
    """
    if leaves:
        fetch_whole_tables(leaves)
        fetch_tables_by_name(graph, leaves)
        rank_parts.gather_fetched(graph, leaves)
    prepared, writes = graph_state.of(graph, PreparedGraph), graph_state.of(graph, Announcements)
    if prepared.state != (graph.version, options, writes.wanted):
        # A script may run a graph that isn't the default graph; TensorFlow would be eager then.
        with graph.as_default():
            for graph_pass in PASSES:
                graph_pass(graph, options)
        prepared.state = graph.version, options, writes.wanted
    if leaves:
        metric_reads.reduce_fetched(graph, leaves)


def prepare_gradients(graph: tf.Graph, ys: Any, xs: list[Any]) -> list[Any]:
    """Prepares a graph in which the gradients of `ys` with respect to `xs` are about to be taken.

    Returns:
        `xs`, or the tensors their staged copies in a graph that was split.
    """
    xs = enable.staged(graph, xs)
    rank_parts.settle(graph)
    group_lookups(graph, SCOPES.options, ys, xs)
    return xs
