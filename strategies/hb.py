"""Lays out the unpooled exchange: distinct keys out, one row back per distinct key.

HybridBackend does it so. The asker pools.

    asker                                       owner
    1. distinct keys of every table
    2. keys            ── all-to-all ──►
                                                3. their rows
    4. rows            ◄── all-to-all ──
    5. one row per id, or pooled per sample

The gradient runs the same way back: 5 sums the gradients of each distinct row, 4 is one all-to-all
to the owners, 3 sums the gradients that several ranks send for one row. Least travels where keys
repeat.
"""

from __future__ import annotations

from collections.abc import Sequence

from collective.ops.exchange.embedding_bag import Section
from collective.strategies import base


class HbBackend(base.Backend):
    """Serves COLLECTIVE_STRATEGY=hb: makes one section a table."""

    def layout(self, group: Sequence[base.Lookup]) -> base.GroupLayout:
        tables = base.tables_of(group)
        places = {id(table): i for i, table in enumerate(tables)}
        return base.GroupLayout(
            tables,
            tuple(Section(i, table.dim) for i, table in enumerate(tables)),
            tuple(places[id(lookup.table)] for lookup in group),
        )
