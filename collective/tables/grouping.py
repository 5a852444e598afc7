"""Groups the lookups of a graph automatically, so that they share exchanges.

This happens before gradients are taken, and before a session runs the graph.

Each lookup is first built as the identity of a complete exchange of its own, which is correct
wherever it is used. Grouping builds one exchange for many lookups and points their identities to
it. A run that needs only some of a group's lookups feeds empty arrays for the others (see
`collective.strategies.required_operations`): it still needs the same data, and
exchanges for the same lookups.

Some lookups keep exchanges of their own, with the same results:

* lookups in branches, loops and functions, where an identity can't be redirected;
* lookups made under `tf.control_dependencies`, or while a `tf.GradientTape` records, which both
refer to the lookup's own exchange;
* lookups in a graph that a session has already run: TensorFlow accepts no change of it;
* lookups of types other than float32, and all lookups if the compiled operations aren't built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Set
from typing import Any

import tensorflow.compat.v1 as tf

from collective import strategies
from collective.ops import native_library
from collective.ops.communication import collectives, gate
from collective.ops.counting import counted
from collective.ops.exchange.key_exchange import Wire
from collective.ops.graph import (
    device_scopes,
    graph_state,
    graphs,
    library_operations,
    nested_calls,
    seen_operations,
)
from collective.ops.graph.graph_analysis import (
    VARIABLE_TYPES,
    gives_other_values,
    marks_upstream,
    upstream,
)
from collective.ops.kernel_device import on_device
from collective.options import ScopeOptions
from collective.scope import SCOPES
from collective.startup import STARTUP
from collective.strategies.grouped_exchange import Group, exchange_group, groups_of
from collective.strategies.single_exchange import exchange_single
from collective.tables import dense_view
from collective.tensorflow_internals.graphs import pywrap_tfe

# Whether lookups that are made now will be grouped.
_enabled = False


def use(enabled: bool) -> None:
    """Sets whether lookups that are made from now on will be grouped."""
    global _enabled
    _enabled = enabled


@dataclasses.dataclass(eq=False)  # Tensors of functions don't tell whether they are equal.
class WrittenLookup:
    """Records a lookup as the script wrote it.

    Attributes:
        lookup: the lookup.
        out: the identity that the script received.
        reason_ungrouped: why it keeps an exchange of its own; '' if it can be grouped.
        group: its group, once it has one.
    """

    lookup: strategies.Lookup
    out: tf.Operation
    reason_ungrouped: str
    group: Group | None = None


@dataclasses.dataclass
class GraphLookups:
    """Records the lookups of one graph.

    Attributes:
        written: all of them, in the order in which they were written.
    """

    written: list[WrittenLookup] = dataclasses.field(default_factory=list)
    _ungrouped: list[WrittenLookup] = dataclasses.field(default_factory=list)

    def add(self, lookup: strategies.Lookup, out: tf.Tensor, reason_ungrouped: str) -> None:
        """Notes that `lookup` was written, with the result `out`."""
        if not graphs.is_function(out.graph):
            self.written.append(WrittenLookup(lookup, out.op, reason_ungrouped))
            self._ungrouped.append(self.written[-1])
        STARTUP.made_lookup(graphs.outermost(out.graph))

    def groupable(self) -> list[WrittenLookup]:
        """Returns the lookups that could be grouped."""
        return [written for written in self._ungrouped if not written.reason_ungrouped]

    def group(
        self,
        backend: strategies.Backend,
        wire: Wire,
        ys: Iterable[Any] | None = None,
        xs: Iterable[Any] = (),
        answers: bool = True,
    ) -> None:
        """Builds exchanges for lookups that have only their own.

        A lookup that depends on another lookup's rows is one level later, in an exchange that waits
        for theirs.

        Args:
            backend: lays the groups out.
            wire: the types in which rows and gradients travel.
            ys: only lookups that these depend on are grouped; by default all.
            xs: gradients are about to be taken with respect to these.
            answers: keys are exchanged in the runs that use their rows.
        """
        graph = tf.get_default_graph()
        seen = seen_operations.last(graphs.outermost(graph))
        for written in self.groupable():
            if written.out._id <= seen:
                written.reason_ungrouped = "a session had run its graph"
        groupable = self.groupable()
        if not groupable or graphs.is_function(graph):
            return
        if ys is not None:
            reached = upstream(y.op for y in ys)
            groupable = [w for w in groupable if w.out in reached]
        xs_operations = {x.op for x in xs if isinstance(x, tf.Tensor)}
        gates = gate.gates_of(graph)
        by_level: dict[tuple[int, bool, int], list[WrittenLookup]] = {}
        levels = gates.levels_of(
            {written.out: [x.op for x in written.lookup.inputs] for written in groupable}
        )
        sources = _sources(groupable)
        for written, level, source in zip(groupable, levels, sources):
            # A group's tables are all on the GPU, or all in the host's memory.
            key = (level, on_device(written.lookup.table.hashed), source)
            by_level.setdefault(key, []).append(written)
        with graphs.open_for_changes(graph):
            for (level, *_), lookups in sorted(by_level.items(), key=lambda item: item[0]):
                if collectives.size() > 1:
                    gates.at(level, str(lookups[0].lookup.table.op.name))
                with (
                    graphs.outside(),
                    device_scopes.anywhere(),
                    tf.name_scope(f"collective/group{len(groups_of(graph)) + 1}/"),
                ):
                    group = exchange_group(
                        backend,
                        [_with_weight_gradients(w.lookup, xs_operations) for w in lookups],
                        level,
                        wire,
                        answers=answers,
                    )
                groups_of(graph).append(group)
                for written, member in zip(lookups, group.members):
                    written.out._update_input(0, member.out)
                    written.group = group
                    self._ungrouped.remove(written)
        gates.changed()


def group_in_scope(
    graph: tf.Graph, options: ScopeOptions, ys: Any = None, xs: Iterable[Any] = ()
) -> None:
    """Groups the lookups of `graph` that can be, by the options of scope().

    Args:
        graph: the graph.
        options: those in force.
        ys, xs: see `GraphLookups.group`.
    """
    lookups = lookups_of(graph)
    wire = Wire(
        tf.as_dtype(options.wire_dtype or "float32"),
        tf.as_dtype(options.gradient_wire_dtype or "float32"),
    )
    work = f"grouping {counted(len(lookups.groupable()), 'lookup')}"
    with graph.as_default(), library_operations.noted(graph), STARTUP.doing(graph, work):
        lookups.group(
            strategies.backend(),
            wire,
            None if ys is None else tf.nest.flatten(ys),
            xs,
            answers=not options.prefetch_keys,
        )


def group_traced(graph: tf.Graph) -> None:
    """Connects the lookups of a traced function so far to an exchange.

    It is called before the function takes gradients, writes tables or branches, and at its end.
    """
    if lookups_of(graph).groupable():
        group_in_scope(graph, SCOPES.options)


def before_write(table: Any) -> None:
    """Keeps a function's writes of tables in order: lookups from before read the rows as they are.

    TensorFlow orders what uses a variable by when the operations were made, and the exchanges of
    lookups are made when these are grouped. A function that another one calls becomes a part of
    that.

    Raises:
        NotImplementedError: such a function can't become a part.
        TableError: the table is read and written in a loop of a session's graph.
    """
    graph = tf.get_default_graph()
    dense_view.note_write(table)
    if graphs.is_traced(graphs.outermost(graph)):
        # TensorFlow notes what is read. A call that writes a table trains.
        graph.watch_variable(table)
    if graphs.is_traced(graph):
        group_traced(graph)
    elif nested_calls.want_inlining(graph):
        raise NotImplementedError(
            f"table '{table.op.name}' is written in a function that is inside a tf.function, and "
            "has to become a part of that: call the tf.function itself, made without jit_compile."
        )


def lookups_of(graph: tf.Graph) -> GraphLookups:
    """Returns the lookups of `graph`, or of the graph around it if it is a function's."""
    return graph_state.of(graphs.outermost(graph), GraphLookups)


def exchange_alone(lookup: strategies.Lookup) -> tuple[tf.Tensor, str]:
    """Builds an exchange of its own for `lookup`.

    Until it is grouped, it is a group of one, which takes fewer operations; a lookup that can't be
    grouped uses TensorFlow's own operations.

    Returns:
        (the result; why it can't be grouped, '' if it can)
    """
    reason, graph = reason_alone(lookup), tf.get_default_graph()
    with device_scopes.anywhere():
        if reason or graphs.is_function(graph) or on_device(lookup.table.hashed) or not _enabled:
            return exchange_single(lookup), reason
        level = gate.gates_of(graph).after(lookup.inputs).level if collectives.size() > 1 else 1
        wire = Wire(tf.float32, tf.float32)
        if lookup.sparse_weights is not None:
            lookup = dataclasses.replace(lookup, weights_have_gradients=True)
        alone = exchange_group(strategies.backend(), [lookup], level, wire, provisional=True)
        return alone.members[0].out, reason


def _sources(lookups: Iterable[WrittenLookup]) -> list[int]:
    """Returns a number for each lookup; on one rank, lookups that read the same data share it.

    One rank may run a graph outside of scope(), where nothing feeds the lookups that a run doesn't
    need: a lookup must then need only its own data. With more ranks each number is 0, and in a
    traced function, whose calls need all lookups.
    """
    lookups = list(lookups)
    if collectives.size() > 1 or graphs.is_traced(tf.get_default_graph()):
        return [0] * len(lookups)
    inputs = [[x.op for x in written.lookup.inputs] for written in lookups]
    found = upstream(op for operations in inputs for op in operations)
    sources = [op for op in found if gives_other_values(op.type)]
    marks = {op: 1 << i for i, op in enumerate(sources)}
    before = marks_upstream(found, marks)
    numbers: dict[int, int] = {}
    result = []
    for operations in inputs:
        read = 0
        for op in operations:
            read |= before[op] | marks.get(op, 0)
        result.append(numbers.setdefault(read, len(numbers)))
    return result


def reason_alone(lookup: strategies.Lookup) -> str:
    """Returns why `lookup`, made now, can't share an exchange; '' if it can."""
    if native_library.missing():  # The plan says why, once for all lookups.
        return "the compiled operations are missing"
    is_hidden = not lookup.unchecked and lookup.table.rows is not None
    graph = tf.get_default_graph()
    if is_hidden or graph._get_control_flow_context() is not None:
        return "it is in a branch or a loop"
    if lookup.table.dtype.base_dtype != tf.float32:
        return f"its table is {lookup.table.dtype.base_dtype.name}"
    if graph._current_control_dependencies() and not graphs.is_traced(graph):
        return "it was made under tf.control_dependencies"
    if not pywrap_tfe.TFE_Py_TapeSetIsEmpty() and not graphs.is_traced(graph):
        return "a tf.GradientTape records it"
    if isinstance(lookup.max_norm, tf.Tensor):
        return "its max_norm is a tensor"
    if lookup.max_norm is not None and not lookup.max_norm > 0:
        return f"its max_norm is {lookup.max_norm}"
    return ""


def _with_weight_gradients(
    lookup: strategies.Lookup, xs_operations: Set[tf.Operation]
) -> strategies.Lookup:
    """Returns `lookup`, noting whether its weights depend on a variable or on `xs_operations`."""
    if lookup.sparse_weights is None:
        return lookup
    depends = any(
        op.type in VARIABLE_TYPES or op in xs_operations
        for op in upstream([lookup.sparse_weights.values.op])
    )
    return dataclasses.replace(lookup, weights_have_gradients=depends)
