"""Exchanges one lookup with TensorFlow's own operations.

That is right in branches, loops and functions, too.

    asker                                       owner
    1. distinct keys, ordered by owner
    2. keys            ── all-to-all ──►
                                                3. their rows
    4. rows            ◄── all-to-all ──
    5. one row per id, or pooled per sample

The gradient runs the same way back: 5 sums the gradients of each distinct row, 4 is one all-to-all
to the owners, 3 gives the shard `IndexedSlices`.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import kernel_device
from collective.ops.communication import collectives, gate
from collective.ops.exchange import key_exchange, tensorflow_lookup
from collective.ops.graph.graphs import is_outside
from collective.strategies.base import Lookup


def exchange_single(lookup: Lookup) -> tf.Tensor:
    """Returns the result of `lookup`, from an exchange of its own."""
    ranks, table = collectives.size(), lookup.table
    name = collectives.unique_name(f"{table.op.name}/keys")
    zero, ids, gates = 0, lookup.ids, gate.gates_of(tf.get_default_graph())
    checks = []
    if lookup.unchecked:
        bounds = tensorflow_lookup.bounds(ids)[None]
        checks.append(gate.Check(name, (table.op.name,), (table.rows,), bounds))
    if ranks == 1:
        # Of what it pools on a GPU, TensorFlow checks nothing.
        if lookup.sparse_ids is not None and kernel_device.chosen() != "cpu":
            checks.append(_mismatch_check(name, lookup, lookup.sparse_ids.indices[:, 0]))
        (ids,) = gates.after_checks(checks, [ids])
    else:
        zero = gates.after(lookup.inputs).zero
        gates.checks += checks
        if lookup.sparse_ids is not None and is_outside(tf.get_default_graph()):
            gates.checks.append(_mismatch_check(name, lookup, lookup.sparse_ids.indices[:, 0]))
    # 1
    distinct = tensorflow_lookup.distinct_by_owner(tf.reshape(ids, [-1]), table.owners, ranks)
    # 2
    keys, counts, splits = _keys_to_owners(lookup, distinct, name, zero)
    # 3
    shard_rows = table.fetch(keys) if counts is None else table.fetch(keys, counts)
    # 4
    rows = key_exchange.rows_back(
        shard_rows, splits, collectives.unique_name(f"{table.op.name}/rows"), zero
    )
    # 5
    return lookup.combined(rows, distinct.positions)


def _keys_to_owners(
    lookup: Lookup, distinct: tensorflow_lookup.Distinct, name: str, zero: Any
) -> tuple[tf.Tensor, tf.Tensor | None, tf.Tensor]:
    """Sends every key to its owner; with it how often it was asked for, if its table counts keys.

    Returns:
        (the keys [R] that are asked for here; their counts [R] int64, or None; [N] int32, how many
        come from each rank).
    """
    keys, splits, description = distinct.keys, distinct.splits, str(lookup)
    if not lookup.table.counts_keys:
        received = key_exchange.keys_to_owners(keys, splits, name, zero, description=description)
        return received.keys, None, received.splits
    counts = tensorflow_lookup.occurrences(distinct)
    words = tf.reshape(tf.stack([keys, counts], 1), [-1])
    received = key_exchange.keys_to_owners(words, 2 * splits, name, zero, description=description)
    pairs = tf.reshape(received.keys, [-1, 2])
    return pairs[:, 0], pairs[:, 1], received.splits // 2


def _mismatch_check(name: str, lookup: Lookup, samples: tf.Tensor) -> gate.Check:
    """Checks that the indices and weights of a lookup that combines rows belong to its ids."""
    weights = None if lookup.sparse_weights is None else lookup.sparse_weights.values
    mismatches = tensorflow_lookup.mismatches(lookup.ids, samples, weights)
    wrong = (gate.PLACES, gate.ORDER, gate.WEIGHTS)[: 2 if weights is None else 3]
    return gate.Check(
        name,
        (lookup.table.op.name,) * len(wrong),
        (1,) * len(wrong),
        tf.stack([mismatches, mismatches], 1),
        wrong,
    )
