"""The unpooled exchange, as HybridBackend does it: distinct keys out, one row back per distinct key, the asker pools.

    asker                                       owner
    1. distinct keys, ordered by owner
    2. keys            ── all-to-all ──►
                                                3. their rows
    4. rows            ◄── all-to-all ──
    5. one row per id, or pooled per sample

The gradient runs the same way back: 5 sums what each distinct row received, 4 is one all-to-all to the owners, 3 gives the
shard `IndexedSlices` in which a row appears once per rank that asked for it.
"""
from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from collective.ops import communication, exchange, gate, kernels
from collective.strategies import base


class HbBackend(base.Backend):
    """The backend of COLLECTIVE_STRATEGY=hb."""

    def exchange(self, group: Sequence[base.Lookup]) -> list[tf.Tensor]:
        return [self._exchange_one(lookup) for lookup in group]

    def _exchange_one(self, lookup: base.Lookup) -> tf.Tensor:
        ranks, table = communication.size(), lookup.table
        name = communication.unique_name(f'{table.op.name}/keys')
        zero = 0
        if ranks > 1:
            gates = gate.gates_of(tf.get_default_graph())
            zero = gates.behind([lookup.ids]).zero
            if lookup.bounds is not None:
                gates.checks.append(gate.Check(name, table.op.name, table.rows, lookup.bounds))
        distinct = kernels.distinct_by_owner(tf.reshape(lookup.ids, [-1]), table.owners, ranks)         # 1
        asked = exchange.keys_to_owners(distinct, name, zero)                                           # 2
        found = table.fetch(asked.keys)                                                                 # 3
        rows = exchange.rows_back(found, asked, communication.unique_name(f'{table.op.name}/rows'), zero)   # 4
        return lookup.combined(rows, distinct.positions)                                                # 5
