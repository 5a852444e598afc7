"""Lays out the pooled exchange: the owner pools the keys that it owns of each sample.

NVIDIA's SparseOperationKit does it so.

    asker                                       owner
    1. each sample's keys, by owner
    2. keys, weights   ── all-to-all ──►
                                                3. the sum of their rows, one a sample
    4. partial sums    ◄── all-to-all ──
    5. the sum of all owners' sums, divided by the asker for 'mean' and 'sqrtn'

The gradient runs the same way back: a sample's gradient goes once to each owner of its keys, which
adds it to their rows. Least travels where samples have many ids that rarely repeat. Keys go to
their owners only. (SparseOperationKit gathers all keys on all ranks.)

A lookup of plain rows has nothing to pool, and weights that have a gradient need the rows that they
weigh: these go the unpooled way (see `collective.strategies.hb`) in the same three all-to-alls.
"""

from __future__ import annotations

from collections.abc import Sequence

from collective.ops.exchange.embedding_bag import Section
from collective.strategies import base


class SokBackend(base.Backend):
    """Serves COLLECTIVE_STRATEGY=sok: the owners pool.

    There is one section for each lookup that the owner can pool, and one a table for all others.
    """

    def layout(self, group: Sequence[base.Lookup]) -> base.GroupLayout:
        tables = base.tables_of(group)
        places = {id(table): i for i, table in enumerate(tables)}
        sections: list[Section] = []
        members: list[int] = []
        unpooled: dict[int, int] = {}
        for lookup in group:
            table = places[id(lookup.table)]
            pooled = lookup.sparse_ids is not None and not lookup.weights_have_gradients
            if pooled or table not in unpooled:
                if not pooled:
                    unpooled[table] = len(sections)
                sections.append(
                    Section(
                        table,
                        lookup.table.dim,
                        pooled,
                        pooled and lookup.sparse_weights is not None,
                        (lookup.max_norm or 0.0) if pooled else 0.0,
                    )
                )
                members.append(len(sections) - 1)
            else:
                members.append(unpooled[table])
        return base.GroupLayout(tables, tuple(sections), tuple(members))
