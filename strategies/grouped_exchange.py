"""Exchanges a group of lookups by three all-to-alls: keys, rows, gradients.

The number doesn't depend on how many tables and lookups there are.

    asker                                       owner
    1. request: its bags, by owner
    2. messages        ── all-to-all ──►
                                                3. response: keys by table; find or insert;
                                                   gather one row a bag
    4. rows            ◄── all-to-all ──
    5. pool: the result of each lookup

If ranks share memory, steps 2 to 4 may be one: each owner answers a rank as soon as its keys have
arrived, and step 5 begins while rows still arrive (`collective.ops.exchange.answered_exchange`).

The backend decides what a bag is (`collective.strategies.base.GroupLayout`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops import kernel_device
from collective.ops.communication import collectives, gate, hierarchy
from collective.ops.exchange import (
    answered_exchange,
    dispatch,
    embedding_bag,
    key_exchange,
)
from collective.ops.graph import device_scopes, graph_state, graphs
from collective.strategies.base import Backend, GroupLayout, Lookup
from collective.strategies.group_inputs import GroupInputs, checks_of, inputs_of
from collective.strategies.two_level_exchange import RowsInTwoLevels, TwoLevelExchange

COMBINERS = {None: 0, "sum": 1, "mean": 2, "sqrtn": 3}


@dataclasses.dataclass(frozen=True)
class GroupMember:
    """Records a lookup of a group and its inputs in the exchange.

    Attributes:
        lookup: the lookup.
        ids, samples, weights: its inputs, flat and of unknown size: a run that doesn't need the
            lookup feeds them with empty arrays, and doesn't run what they come from. `samples` and
            `weights` are None where the lookup has none.
        out: its result.
    """

    lookup: Lookup
    ids: tf.Tensor
    samples: tf.Tensor | None
    weights: tf.Tensor | None
    out: tf.Tensor


@dataclasses.dataclass
class Group:
    """Records an exchange that was built.

    Attributes:
        name: the name of its first collective.
        level: the level of its gate.
        layout: the layout of its messages.
        members: its lookups.
        keys: the operations with which the exchange of keys ends.
        pool: the operation whose outputs are the members' results.
        prefetched: True if keys are exchanged in runs of their own, a batch ahead, for all members
            (see `collective.prefetch`).
        answered: True if owners answer keys as they come
            (`collective.ops.exchange.answered_exchange`).
        two_levels: True if hosts merge what they exchange
            (`collective.strategies.two_level_exchange`).
        between_hosts: says so, and why; '' for a job on one host.
    """

    name: str
    level: int
    layout: GroupLayout
    members: tuple[GroupMember, ...]
    keys: tuple[tf.Operation, ...]
    pool: tf.Operation
    prefetched: bool = False
    answered: bool = False
    two_levels: bool = False
    between_hosts: str = ""


def exchange_group(
    backend: Backend,
    group: Sequence[Lookup],
    level: int,
    wire: key_exchange.Wire,
    provisional: bool = False,
    answers: bool = True,
) -> Group:
    """Builds one exchange for `group`; none of its inputs depends on another's rows.

    Kernels compute for all of its tables, or for none (`collective.ops.kernel_device.on_device`).
    It is none of the graph's `groups_of` yet.

    Args:
        backend: decides the layout.
        group: lookups of float32 tables, in the same order on every rank.
        level: the level of the gate that the exchange waits for.
        wire: the types in which rows and gradients travel.
        provisional: whether another group will replace it; no run leaves out any of its lookups.
        answers: owners may answer keys as they come, in the run that exchanges them.
    """
    layout, on_device = backend.layout(group), kernel_device.on_device(group[0].table.hashed)
    with dispatch.in_host_memory(not on_device):
        return _build(group, layout, level, wire, provisional, answers and not on_device)


def _build(
    group: Sequence[Lookup],
    layout: GroupLayout,
    level: int,
    wire: key_exchange.Wire,
    provisional: bool,
    answers: bool,
) -> Group:
    ranks, hosts = collectives.size(), None if provisional else hierarchy.of_group()
    kinds = [table.placement.kind for table in layout.tables]
    counted = [table.counts_keys for table in layout.tables]
    prefix = "lookup" if provisional else "group"
    base = f"{prefix}{level}.{_digest(group, layout, wire, hosts)}"
    name = collectives.unique_name(f"{base}/keys")
    rows_name = collectives.unique_name(f"{base}/rows")
    gates = gate.gates_of(tf.get_default_graph())
    zero = gates.at(level).zero if ranks > 1 else 0
    inputs = inputs_of(group, optional=not provisional)
    checks = checks_of(name, group, inputs)
    if ranks > 1:
        gates.checks += checks
        ids = inputs.ids
    else:
        ids = gates.after_checks(checks, inputs.ids)
    straight = _pools_from_tables(layout, inputs, group, kinds, wire)
    # 1
    request = _request(group, layout, inputs, ids, kinds, counted, hosts, straight)
    pooling = _pooling(group, layout, inputs, request)
    # 2 to 4
    answered = answers and not hosts and answered_exchange.is_possible(kinds, counted, wire)
    if answered:
        given = answered_exchange.exchange(
            [table.handle for table in layout.tables],
            request,
            pooling,
            layout.sections,
            kinds,
            [table.shard_shape for table in layout.tables],
            (name, rows_name),
            zero,
        )
        exchanged = _Exchanged(given.rows, (given.message.op,), (given.early,))
    else:
        kind = RowsInTwoLevels if hierarchy.keeps_order() else TwoLevelExchange
        two_levels = hosts and kind(hosts, layout.sections, kinds, counted, zero, wire)
        exchanged = _in_turn(
            layout, request, kinds, counted, (name, rows_name), zero, wire, two_levels, straight
        )
    # 5
    outputs = embedding_bag.pool(
        exchanged.rows,
        request.positions,
        *pooling,
        request.counts,
        exchanged.early,
        [layout.tables[section.table].handle for section in layout.sections] if straight else [],
        request.own_ids,
    )
    return Group(
        name,
        level,
        layout,
        tuple(
            GroupMember(lookup, i, s, w, _in_shape_of_ids(output, lookup))
            for lookup, i, s, w, output in zip(
                group, inputs.ids, inputs.samples, inputs.weights, outputs
            )
        ),
        (request.message.op, *exchanged.keys, *(check.bounds.op for check in checks)),
        outputs[0].op,
        answered=answered,
        two_levels=hosts is not None,
        between_hosts=hierarchy.explanation(),
    )


def _pools_from_tables(
    layout: GroupLayout,
    inputs: GroupInputs,
    group: Sequence[Lookup],
    kinds: Sequence[int],
    wire: key_exchange.Wire,
) -> bool:
    """Tells whether step 5 reads the tables themselves, without the rows of step 3.

    One rank has all rows, and its ids are the rows' numbers. The gradients of weights and of
    clipped rows need the rows as they were.
    """
    return (
        collectives.size() == 1
        and dispatch.launch_kernels()
        and wire == key_exchange.Wire(tf.float32, tf.float32)
        and all(kind == embedding_bag.STATIC for kind in kinds)
        and not any(section.pooled for section in layout.sections)
        and all(weights is None for weights in inputs.weights)
        and not any(lookup.max_norm for lookup in group)
    )


class _Exchanged(NamedTuple):
    """Holds the rows that came back, the operations with which the exchange of keys ends, and what
    was pooled while rows still came.
    """

    rows: tf.Tensor
    keys: tuple[tf.Operation, ...]
    early: tuple[tf.Tensor, ...] = ()


def _in_turn(
    layout: GroupLayout,
    request: embedding_bag.Request,
    kinds: Sequence[int],
    counted: Sequence[bool],
    names: tuple[str, str],
    zero: Any,
    wire: key_exchange.Wire,
    two_levels: TwoLevelExchange | None,
    unread: bool,
) -> _Exchanged:
    """Exchanges keys and rows, all keys before any row."""
    ranks, (keys_name, rows_name) = collectives.size(), names
    # 2
    message, splits = (
        two_levels.keys_to_owners(request, keys_name)
        if two_levels
        else key_exchange.keys_to_owners(
            request.message, request.splits, keys_name, zero, 2 * len(layout.sections)
        )
    )
    # 3
    response = embedding_bag.respond(message, splits, layout.sections, kinds, ranks, counted)
    shard_rows = embedding_bag.gather(
        [table.handle for table in layout.tables],
        _local_rows(layout.tables, response, counted),
        message,
        splits,
        layout.sections,
        kinds,
        ranks,
        [table.shard_shape for table in layout.tables],
        counted,
        response.headers,
        unread,
    )
    # 4
    rows = (
        two_levels.rows_back(shard_rows, response.row_splits, rows_name)
        if two_levels
        else key_exchange.rows_back(shard_rows, response.row_splits, rows_name, zero, wire)
    )
    merging = two_levels.merging if two_levels else ()
    return _Exchanged(rows, (message.op, response.row_splits.op, *merging))


def _request(
    group: Sequence[Lookup],
    layout: GroupLayout,
    inputs: GroupInputs,
    ids: Sequence[tf.Tensor],
    kinds: Sequence[int],
    counted: Sequence[bool],
    hosts: hierarchy.Hosts | None,
    own_ids: bool,
) -> embedding_bag.Request:
    samples, own_samples, weights, own_weights, members = [], [], [], [], []
    for i, (lookup, s) in enumerate(zip(group, layout.members)):
        section = layout.sections[s]
        own_samples.append(None if section.pooled else inputs.samples[i])
        if section.pooled:
            samples += [x for x in (inputs.samples[i],) if x is not None]
            weights += [x for x in (inputs.weights[i],) if x is not None]
        elif not lookup.weights_have_gradients:
            own_weights += [x for x in (inputs.weights[i],) if x is not None]
        combiner = COMBINERS[lookup.combiner] if section.pooled else 0
        weighted = section.pooled and lookup.sparse_weights is not None
        members.append(embedding_bag.BagMember(s, section.dim, combiner, weighted))
    return embedding_bag.request(
        ids,
        samples,
        weights,
        members,
        layout.sections,
        kinds,
        collectives.size(),
        counted,
        1 if hosts is None else hosts.number,
        own_samples,
        own_weights,
        own_ids,
    )


def _pooling(
    group: Sequence[Lookup],
    layout: GroupLayout,
    inputs: GroupInputs,
    request: embedding_bag.Request,
) -> embedding_bag.Pooling:
    """Returns how the lookups' results come of the rows that come back."""
    bag_samples, scales = iter(request.samples), iter(request.scales)
    own_samples, own_weights = iter(request.own_samples), iter(request.own_weights)
    members, samples, weights = [], [], []
    for i, (lookup, s) in enumerate(zip(group, layout.members)):
        section = layout.sections[s]
        if section.pooled:
            # The sum of the owners' sums, each times its scale.
            members.append(embedding_bag.BagMember(s, section.dim, COMBINERS["sum"], True))
            samples.append(next(bag_samples))
            weights.append(next(scales))
            continue
        members.append(
            embedding_bag.BagMember(
                s,
                section.dim,
                COMBINERS[lookup.combiner],
                inputs.weights[i] is not None,
                lookup.max_norm or 0.0,
            )
        )
        if inputs.samples[i] is not None:
            samples.append(next(own_samples))
        if (own := inputs.weights[i]) is not None:
            weights.append(own if lookup.weights_have_gradients else next(own_weights))
    return embedding_bag.Pooling(samples, weights, members)


def _local_rows(
    tables: Sequence[Any], response: embedding_bag.Response, counted: Sequence[bool]
) -> list[tf.Tensor]:
    """Returns the local rows of the requested keys, [R] int64 for each table.

    The keys of static tables are local rows already; those of dynamic tables are looked up.
    """
    rows, counts = list(response.keys), iter(response.counts)
    counts_of_tables = [next(counts) if is_counted else None for is_counted in counted]
    dynamic = [t for t, table in enumerate(tables) if table.hashed]
    if dynamic:
        dynamic_rows = tables[dynamic[0]].local_of_tables(
            [tables[t] for t in dynamic],
            [rows[t] for t in dynamic],
            [counts_of_tables[t] for t in dynamic],
        )
        for t, table_rows in zip(dynamic, dynamic_rows):
            rows[t] = table_rows
    return rows


@dataclasses.dataclass
class GraphGroups:
    """Records the groups of lookups of a graph, in the order in which they were built."""

    groups: list[Group] = dataclasses.field(default_factory=list)


def groups_of(graph: tf.Graph) -> list[Group]:
    """Returns the groups built in `graph`, or in the graph around it if it is a function's."""
    return graph_state.of(graphs.outermost(graph), GraphGroups).groups


def _in_shape_of_ids(output: tf.Tensor, lookup: Lookup) -> tf.Tensor:
    if lookup.sparse_ids is None:
        if lookup.ids.shape.ndims != 1:
            with device_scopes.on_host():
                shape = tf.concat([tf.shape(lookup.ids), [lookup.table.dim]], 0)
            output = tf.reshape(output, shape)
        output.set_shape(lookup.ids.shape.concatenate([lookup.table.dim]))
    return output


def _digest(
    group: Sequence[Lookup],
    layout: GroupLayout,
    wire: key_exchange.Wire,
    hosts: hierarchy.Hosts | None,
) -> str:
    """Returns a name by which ranks notice in time that they are to exchange different things."""
    parts: list[Any] = [
        (x.table.op.name, x.table.rows, x.table.dim, x.combiner, x.max_norm, s)
        for x, s in zip(group, layout.members)
    ]
    parts += [dataclasses.astuple(section) for section in layout.sections] + [str(wire)]
    # Messages of tables that count keys, and of kernels, look different.
    parts += [s for s, section in enumerate(layout.sections) if _counts(layout, section)]
    if kernel_device.on_device(group[0].table.hashed):
        parts.append("by kernels")
    if hosts is not None:
        parts.append((*hosts, *(["in order"] if hierarchy.keeps_order() else [])))
    return hashlib.blake2b(repr(parts).encode(), digest_size=4).hexdigest()


def _counts(layout: GroupLayout, section: embedding_bag.Section) -> bool:
    return bool(layout.tables[section.table].counts_keys)
