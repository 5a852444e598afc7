"""Decides which keys of a dynamic table get rows, as its policy says: by count, by chance, or both.

    training ──► keys, each with how often it was requested ──► owners: counted ──► a row, or none a
    key without a row ──► reads row 0, and its gradient is dropped

Compiled code does it (`ops/native/admission.h`), between finding keys and inserting new ones. For
keys with rows, a separate column holds how often each came, which is saved and restored like an
optimizer's slot. Evaluation, prediction and serving count nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.errors import TableError
from collective.ops import kernel_device
from collective.ops.graph import device_scopes, graph_analysis, graph_state, graphs
from collective.ops.rows import dynamic_rows
from collective.ops.rows.compiled_row_store import FilterShape
from collective.policy import COUNTER_TYPES, TablePolicy
from collective.tables.dynamic_table import DynamicTable
from collective.tables.policies import bloom_filter, eager_steps, next_step
from collective.tables.rows import initializers
from collective.tables.updates.slots import Slot

# In bytes: a filter of all ranks that is made in any case; what an exact count takes of memory.
_LARGE, _EXACT_COUNT = 1 << 30, 21


class Frequencies(Slot):
    """Holds, for each row, how often its key came in training; 0 for an imported row.

    Args:
        table: the table.
        collections: those of the table.
    """

    may_be_missing = True  # A checkpoint that lacks it is restored.

    def __init__(self, table: DynamicTable, collections: Sequence[str] | None):
        with tf.init_scope():
            first = tf.zeros([1, 1], tf.int64)
            super().__init__(table, first, f"{table.op.name}/frequency/", collections)

    def add(self, rows: tf.Tensor, added: tf.Tensor) -> tf.Operation:
        """Adds numbers [K] int64 to those of local rows [K]; the number of row 0 is ignored."""
        with device_scopes.on_host():
            # After an IdentityN a write doesn't make a run training
            # (`collective.ops.graph.graph_analysis.holder`); a branch takes it from outside.
            with graphs.outside():
                column = tf.raw_ops.IdentityN(input=[self.handle])[0]
            counted: tf.Operation = tf.raw_ops.ResourceScatterAdd(
                resource=column, indices=rows, updates=added[:, None]
            )
            graph_analysis.mark_note(counted)
        return counted


class Admission:
    """Decides which keys of a table get rows.

    Attributes:
        counts_keys: a key gets its row by how often it came.
        frequencies: how often keys with rows came; None if keys aren't counted.
        filter: the Bloom filter that counts keys without rows; None if they are counted exactly,
            or not at all.

    Args:
        table: the table, whose policy has an admission.
        collections: those of the table.
    """

    def __init__(self, table: DynamicTable, collections: Sequence[str] | None):
        policy = table.policy
        self._table, self._policy = table, policy
        self._seed = initializers.table_seed(f"{table.op.name}/admission", None)
        self.counts_keys = policy.counts_keys
        self.frequencies = Frequencies(table, collections) if policy.counts_keys else None
        self.filter = filter_of(policy, table.placement.parts) if policy.counts_keys else None

    def begin(self, store: Any) -> None:
        """Lets a new store admit keys, before any key is looked up in it."""
        store.keys.admit_by(
            self._policy.filter_freq if self.counts_keys else None,
            self.filter,
            COUNTER_TYPES[self._policy.counter_type],
            self._policy.admit_probability if self._policy.draws_keys else 1.0,
            self._seed,
            self._table.capacity,
        )

    @classmethod
    def rows_of(
        cls,
        tables: Sequence[DynamicTable],
        keys: Sequence[tf.Tensor],
        counts: Sequence[tf.Tensor | None],
        training: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Returns the local rows of keys like `find`, if some of the tables have an admission."""

        found: list[tf.Tensor] = list(keys)
        for find, admits in ((cls.find, True), (DynamicTable.local_of_tables, False)):
            places = [t for t, table in enumerate(tables) if bool(table.admission) == admits]
            if places:
                rows = find(
                    [tables[t] for t in places],
                    [keys[t] for t in places],
                    [counts[t] for t in places],
                    training,
                )
                for t, rows_of_table in zip(places, rows):
                    found[t] = rows_of_table
        return found

    @staticmethod
    def find(
        tables: Sequence[DynamicTable],
        keys: Sequence[tf.Tensor],
        counts: Sequence[tf.Tensor | None],
        training: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Returns the local rows of keys of tables with admission, as `dynamic_rows.admit` does.

        Args:
            tables: T tables.
            keys: T times int64 [K].
            counts: how often each key was requested, int64 [K]; None if the table doesn't count.
            training: bool scalar.
        """
        steps = [next_step.of_table(table) for table in tables if table.policy.draws_keys]
        rows, added = dynamic_rows.admit(
            [table.number for table in tables],
            [table.handle for table in tables],
            keys,
            [tf.zeros_like(k) if c is None else c for k, c in zip(keys, counts)],
            training,
            steps[0] if steps else tf.constant(0, tf.int64),
        )
        return [
            _noted(table, table_rows, table_added, training)
            for table, table_rows, table_added in zip(tables, rows, added)
        ]


def _noted(
    table: DynamicTable, rows: tf.Tensor, added: tf.Tensor, training: tf.Tensor
) -> tf.Tensor:
    """Returns rows, after the operations that note how often and when they were used."""
    owned, noted = dynamic_rows.updated(rows), []
    if table.admission.frequencies is not None:
        noted.append(table.admission.frequencies.add(owned, added))
    if table.last_used is not None:
        noted.append(table.last_used.mark(owned, training))
    if not noted:
        return rows
    with tf.control_dependencies(noted), device_scopes.on_host():
        return tf.identity(rows)


def filter_of(policy: TablePolicy, ranks: int) -> FilterShape | None:
    """Returns this rank's Bloom filter of a policy; None if keys are counted exactly.

    They are without a filter, and in the place of a large one that takes more memory than to count
    as many keys: a checkpoint of it would be of that size, too.

    Args:
        policy: the table's.
        ranks: how many ranks share the keys. Any other rank's filter stays empty, and takes no
            memory.
    """
    elements = policy.max_element_size
    if elements is None or policy.false_positive_probability is None:
        return None
    shape = bloom_filter.shape(
        elements, policy.false_positive_probability, policy.counter_type, ranks
    )
    in_all = shape.partitions * shape.cells * shape.dtype.itemsize
    return None if in_all > max(_LARGE, elements * _EXACT_COUNT) else shape


def prepare(table: DynamicTable, collections: Sequence[str] | None) -> None:
    """Makes what the policy of a new table needs to admit keys.

    Raises:
        TableError: the table is in memory where keys can't be refused.
    """
    policy = table.policy
    admits_some = policy.counts_keys or policy.draws_keys
    if not admits_some and policy.default_value_no_permission == 0:
        return
    if table.bridge is not None:
        option = _option(policy)
        raise TableError(
            f"Table '{table.op.name}' has {option} in its policy, but it is dynamic, and in the "
            f"GPU's memory, where every key gets a row. Set {kernel_device.DYNAMIC}=host, which "
            "has dynamic tables in the host's memory, or leave the option out."
        )
    if not admits_some:
        return
    if not table.compiled:
        raise TableError(
            f"Table '{table.op.name}' has {_option(policy)} in its policy, which needs the "
            "compiled operations, and they aren't built. `make setup` in a checkout builds them "
            "(or python setup.py build_ext --inplace); an installed package has them."
        )
    table.admission = Admission(table, collections)
    if policy.draws_keys and table.is_eager:
        eager_steps.register(table)
    elif policy.draws_keys:
        graph = graphs.outermost(tf.get_default_graph())
        graph_state.of(graph, next_step.NextStep).drawing_tables.append(table)


def _option(policy: TablePolicy) -> str:
    if policy.counts_keys:
        return f"filter_freq={policy.filter_freq}"
    if policy.draws_keys:
        return f"admit_probability={policy.admit_probability}"
    return f"default_value_no_permission={policy.default_value_no_permission}"
