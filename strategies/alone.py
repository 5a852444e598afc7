"""The exchange of one lookup, with TensorFlow's own operations: it is right in branches, loops and functions, too.

    asker                                       owner
    1. distinct keys, ordered by owner
    2. keys            ── all-to-all ──►
                                                3. their rows
    4. rows            ◄── all-to-all ──
    5. one row per id, or pooled per sample

The gradient runs the same way back: 5 sums what each distinct row received, 4 is one all-to-all to the owners, 3 gives the
shard `IndexedSlices`.
"""
from __future__ import annotations

import tensorflow.compat.v1 as tf

from collective.ops import communication, exchange, gate, kernels
from collective.strategies.base import Lookup


def exchange_alone(lookup: Lookup) -> tf.Tensor:
    """What `lookup` returns, from an exchange of its own."""
    ranks, table = communication.size(), lookup.table
    name = communication.unique_name(f'{table.op.name}/keys')
    zero = 0
    if ranks > 1:
        gates = gate.gates_of(tf.get_default_graph())
        zero = gates.behind([lookup.ids]).zero
        if lookup.bounds is not None:
            gates.checks.append(gate.Check(name, (table.op.name,), (table.rows,), lookup.bounds[None]))
    distinct = kernels.distinct_by_owner(tf.reshape(lookup.ids, [-1]), table.owners, ranks)                 # 1
    asked = exchange.keys_to_owners(distinct.keys, distinct.splits, name, zero, what=str(lookup))           # 2
    found = table.fetch(asked.keys)                                                                         # 3
    rows = exchange.rows_back(found, asked.splits, communication.unique_name(f'{table.op.name}/rows'), zero)    # 4
    return lookup.combined(rows, distinct.positions)                                                        # 5
