"""The exchange of a group of lookups: three all-to-alls (keys, rows, gradients), however many
tables and lookups there are.

    asker                                       owner
    1. ask: its bags, by owner
    2. messages        ── all-to-all ──►
                                                3. hear: keys by table; find or insert; gather one
                                                   row a bag
    4. rows            ◄── all-to-all ──
    5. pool: what each lookup returns

What a bag is, is the backend's decision (`collective.strategies.base.GroupLayout`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence, Set
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops import (
    collectives,
    dispatch,
    embedding_bag,
    exchange,
    gate,
    graphs,
    op_attributes,
    placement,
)
from collective.ops.graph_state import state_of
from collective.strategies.base import Backend, GroupLayout, Lookup

COMBINERS = {None: 0, "sum": 1, "mean": 2, "sqrtn": 3}


@dataclasses.dataclass(frozen=True)
class GroupMember:
    """A lookup of a group, as the exchange takes it in.

    Attributes:
        lookup: the lookup.
        ids, samples, weights: its inputs, flat and of unknown size: a run that doesn't need the
            lookup feeds nothing for them, and what they come from isn't run. `samples` and
            `weights` are None where it has none.
        out: what it returns.
    """

    lookup: Lookup
    ids: tf.Tensor
    samples: tf.Tensor | None
    weights: tf.Tensor | None
    out: tf.Tensor

    def nothing(self) -> list[tuple[tf.Tensor, np.ndarray]]:
        """The feeds of a run without it."""
        return [
            (x, np.empty(0, x.dtype.as_numpy_dtype))
            for x in (self.ids, self.samples, self.weights)
            if x is not None
        ]


@dataclasses.dataclass
class Group:
    """An exchange that was built.

    Attributes:
        name: of its collectives.
        level: of its gate.
        layout: what travels.
        members: its lookups.
        keys: the operations with which the exchange of keys ends.
        pool: the operation whose outputs the members' are.
        ahead: whether keys are exchanged in runs of their own, a batch ahead, for all members (see
            `collective.prefetch`).
    """

    name: str
    level: int
    layout: GroupLayout
    members: tuple[GroupMember, ...]
    keys: tuple[tf.Operation, ...]
    pool: tf.Operation
    ahead: bool = False


def exchange_group(
    backend: Backend, group: Sequence[Lookup], level: int, wire: exchange.Wire
) -> Group:
    """Builds one exchange for `group`, none of whose inputs depends on another's rows. Kernels
    compute for all of its tables, or for none (`operations.on_device`).

    Args:
        backend: decides the layout.
        group: lookups of float32 tables, in the same order on every rank.
        level: of the gate that it waits for.
        wire: the types in which rows and gradients travel.
    """
    layout = backend.layout(group)
    with dispatch.about(
        [table.op.name for table in layout.tables], not placement.on_device(group[0].table.hashed)
    ):
        return _built(group, layout, level, wire)


def _built(group: Sequence[Lookup], layout: GroupLayout, level: int, wire: exchange.Wire) -> Group:
    ranks = collectives.size()
    kinds = [int(table.hashed) for table in layout.tables]
    base = f"group{level}.{_digest(group, layout, wire)}"
    name, rows_name = (
        collectives.unique_name(f"{base}/keys"),
        collectives.unique_name(f"{base}/rows"),
    )
    gates = gate.gates_of(tf.get_default_graph())
    zero = gates.at(level).zero if ranks > 1 else 0
    pooled = [layout.sections[s].pooled for s in layout.members]
    ids = [_open(lookup.ids, "ids") for lookup in group]
    samples = [
        None if x.sparse_ids is None else _open(x.sparse_ids.indices[:, 0], "samples")
        for x in group
    ]
    weights = [
        None
        if x.sparse_weights is None
        else _open(tf.cast(x.sparse_weights.values, tf.float32), "weights")
        for x in group
    ]
    static = [i for i, lookup in enumerate(group) if lookup.bounds is not None]
    checks = (
        [
            gate.Check(
                name,
                tuple(group[i].table.op.name for i in static),
                tuple(group[i].table.rows for i in static),
                embedding_bag.bounds([ids[i] for i in static]),
            )
        ]
        if static
        else []
    )
    checks += _mismatches(name, group, ids, samples, weights)
    if ranks > 1:
        gates.checks += checks
    fine = ids if ranks > 1 else _only_if_fine(checks, ids)
    # 1
    asked = embedding_bag.ask(
        fine,
        [x for x, by_owner in zip(samples, pooled) if by_owner and x is not None],
        [x for x, by_owner in zip(weights, pooled) if by_owner and x is not None],
        [
            embedding_bag.BagMember(
                s,
                layout.sections[s].dim,
                COMBINERS[lookup.combiner] if by_owner else 0,
                by_owner and lookup.sparse_weights is not None,
            )
            for lookup, s, by_owner in zip(group, layout.members, pooled)
        ],
        layout.sections,
        kinds,
        ranks,
    )
    # 2
    message, splits = exchange.keys_to_owners(
        asked.message, asked.splits, name, zero, 2 * len(layout.sections)
    )
    # 3
    heard = embedding_bag.hear(message, splits, layout.sections, kinds, ranks)
    rows = _local(layout.tables, heard.keys)
    found = embedding_bag.gather(
        [table.handle for table in layout.tables],
        rows,
        message,
        splits,
        layout.sections,
        kinds,
        ranks,
        [table.shard_shape for table in layout.tables],
    )
    # 4
    received = exchange.rows_back(found, heard.row_splits, rows_name, zero, wire)
    mine, scales = iter(asked.samples), iter(asked.scales)
    # 5
    members = []
    pool_samples, pool_weights = [], []
    for lookup, s, by_owner, sample, weight in zip(group, layout.members, pooled, samples, weights):
        if by_owner:  # the sum of the owners' sums, each times its scale
            members.append(
                embedding_bag.BagMember(s, layout.sections[s].dim, COMBINERS["sum"], True)
            )
            pool_samples.append(next(mine))
            pool_weights.append(next(scales))
            continue
        members.append(
            embedding_bag.BagMember(
                s,
                layout.sections[s].dim,
                COMBINERS[lookup.combiner],
                weight is not None,
                lookup.max_norm or 0.0,
            )
        )
        pool_samples += [] if sample is None else [sample]
        pool_weights += [] if weight is None else [weight]
    outs = embedding_bag.pool(
        received, asked.positions, pool_samples, pool_weights, members, asked.counts
    )
    built = Group(
        name,
        level,
        layout,
        tuple(
            GroupMember(lookup, i, s, w, _shaped(out, lookup))
            for lookup, i, s, w, out in zip(group, ids, samples, weights, outs)
        ),
        (asked.message.op, message.op, heard.row_splits.op, *(check.bounds.op for check in checks)),
        outs[0].op,
    )
    groups_of(outs[0].graph).append(built)
    return built


def _local(tables: Sequence[Any], keys: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """For each table [R] int64, the shard's rows of what it was asked for: of dynamic ones, those
    of its keys.
    """
    rows = list(keys)
    dynamic = [t for t, table in enumerate(tables) if table.hashed]
    if dynamic:
        found = tables[dynamic[0]].local_together(
            [tables[t] for t in dynamic], [keys[t] for t in dynamic]
        )
        for t, some in zip(dynamic, found):
            rows[t] = some
    return rows


def groups_of(graph: tf.Graph) -> list[Group]:
    """The groups that were built in `graph`, or in the graph around it if it is a function's."""
    groups: list[Group] = state_of(graphs.outermost(graph)).groups
    return groups


def _mismatches(
    name: str,
    group: Sequence[Lookup],
    ids: Sequence[tf.Tensor],
    samples: Sequence[tf.Tensor | None],
    weights: Sequence[tf.Tensor | None],
) -> list[gate.Check]:
    """Whether indices, weights and ids of the lookups that combine rows belong together. All that
    comes before these inputs has then succeeded, too, before anything moves.
    """
    combined = [i for i, x in enumerate(samples) if x is not None]
    if not combined:
        return []
    weighted = [
        (place, i, weights[i]) for place, i in enumerate(combined) if weights[i] is not None
    ]
    found = embedding_bag.mismatches(
        [ids[i] for i in combined],
        [samples[i] for i in combined],
        [w for _, _, w in weighted],
        [place for place, _, _ in weighted],
    )
    tables = [group[i].table.op.name for i in combined for _ in range(2)] + [
        group[i].table.op.name for _, i, _ in weighted
    ]
    wrong = [gate.PLACES, gate.ORDER] * len(combined) + [gate.WEIGHTS] * len(weighted)
    return [
        gate.Check(
            name, tuple(tables), (1,) * len(wrong), tf.stack([found, found], 1), tuple(wrong)
        )
    ]


def _only_if_fine(checks: Sequence[gate.Check], ids: list[tf.Tensor]) -> list[tf.Tensor]:
    """`ids`, behind checks that no gate waits for: with one rank there is none."""
    asserted = [
        tf.debugging.assert_equal(
            check.bounds,
            tf.zeros_like(check.bounds),
            message=(
                "the ids, indices and weights of lookups of "
                f"{', '.join(sorted(set(check.tables)))} do not belong together: there must be as "
                "many of each, and indices must ascend"
            ),
        )
        for check in checks
    ]
    gate.gates_of(tf.get_default_graph()).checked.extend(asserted)
    with tf.control_dependencies(asserted):
        return [tf.identity(x) for x in ids]


def _open(x: tf.Tensor, name: str) -> tf.Tensor:
    return tf.placeholder_with_default(tf.reshape(x, [-1]), [None], name)


def _shaped(out: tf.Tensor, lookup: Lookup) -> tf.Tensor:
    if lookup.sparse_ids is None and lookup.ids.shape.ndims != 1:
        out = tf.reshape(out, tf.concat([tf.shape(lookup.ids), [lookup.table.dim]], 0))
    return out


def _digest(group: Sequence[Lookup], layout: GroupLayout, wire: exchange.Wire) -> str:
    """A name by which ranks that exchange something else notice it before they do."""
    told: list[Any] = [
        (x.table.op.name, x.table.rows, x.table.dim, x.combiner, x.max_norm, s)
        for x, s in zip(group, layout.members)
    ]
    told += [dataclasses.astuple(section) for section in layout.sections] + [str(wire)]
    if placement.on_device(group[0].table.hashed):  # whose messages look different
        told.append("by kernels")
    return hashlib.blake2b(repr(told).encode(), digest_size=4).hexdigest()


def required_operations(
    operations: Iterable[tf.Operation], fed: Set[str], groups: Sequence[Group]
) -> tuple[set[tf.Operation], list[tuple[tf.Tensor, np.ndarray]]]:
    """(`operations` and all that they wait for, what to feed for the lookups of `groups` that they
    don't need).

    A group's exchange waits for the inputs of all its lookups. But one whose rows reach nothing,
    neither forward nor by its gradient, isn't needed: nothing is looked up for it, and what its
    inputs come from isn't run.
    """
    members = [(group, i, member) for group in groups for i, member in enumerate(group.members)]
    inputs = {
        x.op: at
        for at, (_, _, member) in enumerate(members)
        for x in (member.ids, member.samples, member.weights)
        if x is not None
    }
    # Every operation that pools, forward or backward, has the group's positions as its second
    # input.
    outputs = {(group.pool.inputs[1].name, i): at for at, (group, i, _) in enumerate(members)}
    held: dict[int, list[tf.Operation]] = {}
    wanted: set[int] = set()
    stack = list(operations)
    seen = set(stack)

    def want(at: int | None) -> None:
        if at is not None and at not in wanted:
            wanted.add(at)
            stack.extend(held.pop(at, []))

    while stack:
        op = stack.pop()
        at = inputs.get(op)
        if at is not None and at not in wanted:
            held.setdefault(at, []).append(op)
            continue
        if outputs and op_attributes.kind(op) == "CollectivePoolGradient":
            for i in op_attributes.attribute(op, "members"):
                want(outputs.get((op.inputs[1].name, i)))
        before = [x for x in op.inputs if x.name not in fed]
        for x in before:
            if outputs and op_attributes.kind(x.op) == "CollectivePool":
                want(outputs.get((x.op.inputs[1].name, x.value_index)))
        for upper in [x.op for x in before] + list(op.control_inputs):
            if upper not in seen:
                seen.add(upper)
                stack.append(upper)
    return seen, [feed for at in held for feed in members[at][2].nothing()]
