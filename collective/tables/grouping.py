"""Lookups share exchanges without being asked to: whoever takes gradients, or runs a graph first,
has its lookups grouped.

Each lookup was written as the identity of a complete exchange of its own, which is right wherever
it is used. Grouping builds one exchange for many of them and points their identities to it. A run
that needs only some of a group's lookups feeds nothing for the others (see
`collective.strategies.grouped_exchange.required_operations`), so what it is about, and what data
it takes, stay what they were.

Left alone, and right all the same, are lookups

* in branches, loops and functions, where an identity can't be pointed elsewhere;
* made under `tf.control_dependencies`, or while a `tf.GradientTape` records: their own exchange is
  what was asked for;
* in a graph that a session has run already: TensorFlow takes no change of it;
* of other types than float32, or where the compiled operations aren't built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Set
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python import pywrap_tfe

from collective import strategies
from collective.ops import collectives, embedding_bag, gate, graphs
from collective.ops.exchange import Wire
from collective.ops.graph_analysis import VARIABLE_TYPES, upstream
from collective.ops.graph_state import GraphState, state_of
from collective.ops.placement import on_device
from collective.strategies.grouped_exchange import Group, exchange_group, groups_of


@dataclasses.dataclass
class WrittenLookup:
    """A lookup as a script wrote it.

    Attributes:
        lookup: the lookup.
        out: the identity that the script was given.
        alone: why it keeps an exchange of its own; '' if it needn't.
        group: the group that it is in, once it is.
    """

    lookup: strategies.Lookup
    out: tf.Operation
    alone: str
    group: Group | None = None


class GraphLookups:
    """Those of one graph.

    Attributes:
        written: all of them, in the order in which they were written.
    """

    def __init__(self, state: GraphState) -> None:
        self.written: list[WrittenLookup] = []
        self._ungrouped: list[WrittenLookup] = []
        self._state = state

    def add(self, lookup: strategies.Lookup, out: tf.Tensor) -> None:
        """Notes that `lookup` was written, and is `out`."""
        if not graphs.is_function(out.graph):
            self.written.append(WrittenLookup(lookup, out.op, _reason_ungrouped(lookup, out)))
            self._ungrouped.append(self.written[-1])

    def groupable(self) -> list[WrittenLookup]:
        """Those that could be grouped."""
        return [written for written in self._ungrouped if not written.alone]

    def group(
        self,
        backend: strategies.Backend,
        wire: Wire,
        ys: Iterable[Any] | None = None,
        xs: Iterable[Any] = (),
    ) -> None:
        """Builds exchanges for lookups that have none but their own: those that `ys` depend on, by
        default all.

        `xs` is what gradients are about to be taken with respect to.

        A lookup that depends on another's rows comes a level later, in an exchange that waits for
        theirs.
        """
        graph = tf.get_default_graph()
        for written in self.groupable():
            if written.out._id <= self._state.seen_by_session:
                written.alone = "a session had run its graph"
        groupable = self.groupable()
        if not groupable or graphs.is_function(graph):
            return
        if ys is not None:
            reached = upstream(y.op for y in ys)
            groupable = [w for w in groupable if w.out in reached]
        learned = {x.op for x in xs if isinstance(x, tf.Tensor)}
        gates = gate.gates_of(graph)
        by_level: dict[tuple[int, bool], list[WrittenLookup]] = {}
        levels = gates.levels_of(
            {written.out: [x.op for x in _inputs(written.lookup)] for written in groupable}
        )
        for written, level in zip(groupable, levels):
            # An exchange is on a GPU or in the host's memory.
            by_level.setdefault((level, on_device(written.lookup.table.hashed)), []).append(written)
        with graphs.open_for_changes(graph):
            for (level, _), together in sorted(by_level.items(), key=lambda item: item[0]):
                with (
                    tf.init_scope(),
                    tf.device(None),
                    tf.name_scope(f"collective/group{len(groups_of(graph)) + 1}/"),
                ):
                    built = exchange_group(
                        backend,
                        [_with_weight_gradients(w.lookup, learned) for w in together],
                        level,
                        wire,
                    )
                for written, member in zip(together, built.members):
                    written.out._update_input(0, member.out)
                    written.group = built
                    self._ungrouped.remove(written)
        gates.changed()


def lookups_of(graph: tf.Graph) -> GraphLookups:
    """The lookups of `graph`; those of the graph around it if it is a function's."""
    state = state_of(graphs.outermost(graph))
    if state.lookups is None:
        state.lookups = GraphLookups(state)
    lookups: GraphLookups = state.lookups
    return lookups


def _inputs(lookup: strategies.Lookup) -> list[tf.Tensor]:
    sparse = [x for x in (lookup.sparse_ids, lookup.sparse_weights) if x is not None]
    return [lookup.ids, *(x.indices for x in sparse), *(x.values for x in sparse)]


def _reason_ungrouped(lookup: strategies.Lookup, out: tf.Tensor) -> str:
    if collectives.size() == 1 and not on_device(lookup.table.hashed):
        return "there is one rank"
    unchecked = lookup.bounds is None and lookup.table.rows is not None and collectives.size() > 1
    if unchecked or out.op._get_control_flow_context() is not None:
        return "it is in a branch or a loop"
    if lookup.table.dtype.base_dtype != tf.float32:
        return f"its table is {lookup.table.dtype.base_dtype.name}"
    # not those of `out`: what it is made of waits for them already
    if out.graph._current_control_dependencies():
        return "it was made under tf.control_dependencies"
    if not pywrap_tfe.TFE_Py_TapeSetIsEmpty():
        return "a tf.GradientTape records it"
    if isinstance(lookup.max_norm, tf.Tensor):
        return "its max_norm is a tensor"
    if lookup.max_norm is not None and not lookup.max_norm > 0:
        return f"its max_norm is {lookup.max_norm}"
    return (
        f"the compiled operations are missing: {embedding_bag.missing()}"
        if embedding_bag.missing()
        else ""
    )


def _with_weight_gradients(
    lookup: strategies.Lookup, learned: Set[tf.Operation]
) -> strategies.Lookup:
    """`lookup`, with what is known of its weights: whether they depend on a variable, or on any of
    `learned`.
    """
    if lookup.sparse_weights is None:
        return lookup
    depends = any(
        op.type in VARIABLE_TYPES or op in learned
        for op in upstream([lookup.sparse_weights.values.op])
    )
    return dataclasses.replace(lookup, weights_have_gradients=depends)
