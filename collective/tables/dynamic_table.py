"""Defines the dynamic table, which has no vocabulary: training adds rows as it meets new keys.

One run of a lookup on the rank that owns the keys:

    keys ──► local rows, found or (in training) inserted, in the session's `Store`
    ──► ResourceGather

One compiled operation finds the rows of all tables of a group (`collective.ops.rows.dynamic_rows`).

Rows and slots are resource variables whose memory is reserved address space, of the host
(`collective.ops.rows.memory`) or of a GPU (`collective.ops.gpu.reserved_memory`): it never moves,
so new rows are written straight into it, and TensorFlow's own kernels read and update it in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow.compat.v1 as tf

from collective.errors import TableError
from collective.ops import kernel_device, placement
from collective.ops.communication import collectives, gate
from collective.ops.exchange import dispatch, shard_gradients, tensorflow_lookup
from collective.ops.graph import device_scopes, graphs, training_flag
from collective.ops.graph.sessions import raw_session
from collective.ops.placement import Placement
from collective.ops.rows import dynamic_rows, keymap, memory
from collective.tables.rows import (
    initializers,
    row_store,
    rows_by_python,
    rows_in_file,
    waiting_gradients,
)
from collective.tables.rows.reserved_variable import ReservedVariable, refusing_method
from collective.tables.rows.row_columns import RowColumn
from collective.tables.rows.row_store import Loading
from collective.tables.rows.statistics import TableStatistics
from collective.tables.table import REFUSED_METHODS, WHOLE_VALUE_METHODS, Table, in_shard_view

_GATHER, _ADMITTED_GATHER = "CollectiveDynamicGather", "CollectiveAdmittedGather"
_STRINGS = (
    "Hash strings as lookups do, in the graph: "
    "session.run(collective.ops.key_hashing.of_strings(strings))"
)


class DynamicTable(ReservedVariable, Table):
    """Holds rows for any int64 keys, placed on ranks by `collective.ops.placement.dynamic`.

    By rows, all ranks share them (`ops.key_hashing` has the mix); a whole table's are all
    on one rank, and the others' stores stay empty.

    A key gets its row when training looks it up for the first time; initial values of row and slots
    depend only on (seed, name, key). Outside of training an unknown key reads zeros, and stays
    unknown. It is looked up and trained like any table: `tf.nn.embedding_lookup`,
    `embedding_lookup_sparse`, `safe_embedding_lookup_sparse`, `tf.gather`, feature columns, every
    optimizer of `tf.train`. Keys are of any integer type, or strings
    (`collective.ops.key_hashing.of_strings`).

    Attributes:
        rows: None.
        dim: D.
        shape: [None, D].
        slots: the slots that optimizers have made for it.
        bridge: shares the memory of the table's device; None in the host's memory, where all tables
            of types other than float32 are.
        compiled: whether compiled operations find its rows, in the host's memory.
        capacity: the largest number of rows on this rank that the memory can hold.
        inserts_always: whether every run inserts the keys that it looks up, not only training.
        iterations: int64 variable, the number of steps of the optimizer that trains a table of
            eager code; None if nothing needs it, or it isn't known.
        evicted_at: the step at which it was last found out whether rows are to be evicted.
        slot_row_count: int64, the number of rows for which slots have values, while an update is
            built.
    """

    hashed = True
    inserts_always = False
    initial_value = None  # There are no rows to begin with.

    def __init__(
        self,
        *,
        initializer: Any,
        shape: tf.TensorShape,
        dtype: tf.DType,
        name: str,
        trainable: bool | None = None,
        collections: Sequence[str] | None = None,
        constraint: Any = None,
        placed: Any = None,
        policy: Any = Table.policy,
        **_: Any,
    ):
        keymap.check()
        self.policy = policy
        self.rows, self.dim = None, shape.as_list()[1]
        self._placed = placed
        self._numpy, self._name = dtype.as_numpy_dtype, name
        self.slots: list[Any] = []
        self.slot_row_count: tf.Tensor | None = None
        self.last_used: Any = None  # `collective.tables.policies.eviction` sets it.
        self.admission: Any = None  # `collective.tables.policies.admission` sets it.
        self.iterations: Any = None  # `collective.tables.policies.eager_steps` sets both.
        self.evicted_at = 0
        self.first_rows: Callable[[Loading], None] | None = None  # init_from_checkpoint sets it.
        self.bridge = (
            dispatch.bridge()
            if dtype == tf.float32 and kernel_device.on_device(dynamic=True)
            else None
        )
        self.compiled = self.bridge is None and row_store.is_compiled()
        self.capacity = self._capacity(self.dim * dtype.size)
        if initializer is None:
            initializer = tf.truncated_normal_initializer(stddev=self.dim**-0.5)
        self._fill = initializers.by_key(initializer, self.dim, name)
        with tf.init_scope(), device_scopes.on_host():
            # The number of rows that were read and wait to replace the session's, 0 for none.
            self.source = tf.constant(0, tf.int64)
            if not tf.executing_eagerly():
                self.source = tf.placeholder_with_default(self.source, [], f"{name}/source")
        self._create(
            name,
            self.capacity + 1,
            self.dim,
            dtype,
            self._start,
            [self.source],
            trainable is not False,
            collections,
            constraint,
            self.bridge is not None,
        )

    def _capacity(self, row_bytes: int) -> int:
        if self.bridge is None:
            return memory.rows_that_fit(row_bytes, keymap.MOST_ROWS)
        # The import takes a while, and only a device needs it.
        from collective.ops.gpu.hash_table import MOST_ROWS

        return int(self.bridge.rows_that_fit(row_bytes, MOST_ROWS - 1))  # Row 0 counts, too.

    def new_store(self) -> row_store.Store:
        """Makes an empty store for this rank's rows, in the memory that the policy asks for."""
        shape = self.capacity, self.dim, self._numpy, self._name, self._fill
        if self.bridge is not None:
            device_store: row_store.Store = _device_row_store().new_store(*shape, self.bridge)
            return device_store
        store: Any = (
            row_store.host_store(*shape, self.compiled)
            if self.policy.storage is None
            else rows_in_file.StoreWithFile(*shape, self.policy)
        )
        self.follow_policy(store)
        return store

    def follow_policy(self, store: Any) -> None:
        """Lets a new store in the host's memory treat unknown keys as the policy says."""
        if unknown := self.policy.default_value_no_permission:
            store.values.write(slice(0, 1), np.full(self.dim, unknown, self._numpy))
        if self.admission is not None:
            self.admission.begin(store)

    @property
    def counts_keys(self) -> bool:
        return self.admission is not None and self.admission.counts_keys

    def _first_store(self) -> row_store.Store:
        """Returns the store that the table starts with: empty, or filled by `first_rows`."""
        if self.first_rows is None:
            return self.new_store()
        loading = self.loading([])
        self.first_rows(loading)
        return loading.store

    def _start(self, path: str, source: np.ndarray) -> np.ndarray:
        store = row_store.registered(int(source)).store if source else self._first_store()
        store.values.expose(path)
        return row_store.register(store.number, store)

    def new_column(
        self, name: str, dim: int, dtype: Any, first: np.ndarray | None = None
    ) -> RowColumn:
        """Makes memory for a slot `name` with rows [`dim`] of `dtype` that start as `first`."""
        shape = self.capacity + 1, dim, dtype
        return (
            row_store.host_column(*shape, first, self.compiled)
            if self.bridge is None
            else _device_row_store().DeviceColumn(name, *shape, self.bridge, first)
        )

    @property
    def shape(self) -> tf.TensorShape:
        """Returns [None, D]; for optimizers [1, D], as one row of a slot stands for all rows."""
        is_one_row = in_shard_view() and self.view is None
        return tf.TensorShape([1 if is_one_row else None, self.dim])

    @property
    def shard_shape(self) -> tf.TensorShape:
        """Returns a shape of unknown rows: their number isn't that of the reserved memory."""
        return tf.TensorShape([None, self.dim])

    @property
    def placement(self) -> Placement:
        placed: Placement | None = self._placed
        return placed or placement.dynamic(collectives.size())

    @property
    def row_placement(self) -> NoReturn:
        """Refuses: the row store alone knows the rows of keys (`local`)."""
        raise TypeError(f"table '{self.op.name}' is dynamic: no placement tells the rows of keys.")

    def local(self, keys_: tf.Tensor, counts: tf.Tensor | None = None) -> tf.Tensor:
        """Returns the local rows of `keys_` [K], int64 [K].

        In training unknown keys are inserted; elsewhere they have row 0, a row of zeros. Of a table
        with admission the rows are those of `collective.ops.rows.dynamic_rows.admit`.

        Args:
            keys_: the keys.
            counts: how often each was requested, int64 [K], for a table that counts.
        """
        insert = self._inserts()
        if self.admission is not None:
            rows: tf.Tensor = self.admission.find([self], [keys_], [counts], insert)[0]
            return rows
        if self.compiled:
            found = dynamic_rows.find([self.number], [self.handle], [keys_], insert)[0]
            return self._marked(found, insert)
        step = None if self.bridge is None else rows_by_python.noted_step(self.last_used)
        return self._marked(rows_by_python.find(self.number, keys_, insert, step), insert)

    def _inserts(self) -> tf.Tensor:
        """Returns whether a run inserts unknown keys, bool scalar."""
        return training_flag.flag(tf.get_default_graph(), self.inserts_always)

    def _marked(self, rows: tf.Tensor, training: tf.Tensor) -> tf.Tensor:
        """Returns local rows, after the operation that notes when they were used, if any does."""
        return rows if self.last_used is None else self.last_used.mark(rows, training)

    @staticmethod
    def local_of_tables(
        tables: Sequence[DynamicTable],
        keys_: Sequence[tf.Tensor],
        counts: Sequence[tf.Tensor | None],
        training: tf.Tensor | None = None,
    ) -> list[tf.Tensor]:
        """Returns `local` for each of `tables`, all in the same memory, for its keys in `keys_`.

        Args:
            tables: the tables.
            keys_: the keys of each.
            counts: as for `local`, of each.
            training: whether unknown keys are inserted, bool scalar. None: as the run says.
        """
        if training is None and len({table.inserts_always for table in tables}) > 1:
            return [table.local(keys, n) for table, keys, n in zip(tables, keys_, counts)]
        insert = tables[0]._inserts() if training is None else training
        admission: Any = next((t.admission for t in tables if t.admission is not None), None)
        if admission is not None:
            admitted: list[tf.Tensor] = admission.rows_of(tables, keys_, counts, insert)
            return admitted
        numbers = [table.number for table in tables]
        if tables[0].bridge is not None:
            steps = [rows_by_python.noted_step(table.last_used) for table in tables]
            found = dispatch.operations().collective_find_rows(
                _device_row_store().find,
                numbers,
                [table.handle for table in tables],
                keys_,
                insert,
                steps,
            )
            return [table._marked(rows, insert) for table, rows in zip(tables, found)]
        if all(table.compiled for table in tables):
            found = dynamic_rows.find(numbers, [table.handle for table in tables], keys_, insert)
            return [table._marked(rows, insert) for table, rows in zip(tables, found)]
        return [table.local(keys) for table, keys in zip(tables, keys_)]

    def fetch(self, keys_: tf.Tensor, counts: tf.Tensor | None = None) -> tf.Tensor:
        """Returns the rows of `keys_` [K] int64, all of which this rank owns: [K, D].

        Unknown keys have zeros, except in training. The gradient is `IndexedSlices` by local row.
        For `counts` see `local`.
        """
        local, name, gradient = self.local(keys_, counts), _GATHER, _gather_gradient
        with device_scopes.on_host() if self.bridge is None else dispatch.device(dynamic=True):
            if self.admission is not None:
                local = dynamic_rows.seen(local)
                name, gradient = _ADMITTED_GATHER, _admitted_gradient
            rows = tensorflow_lookup.gather_with(name, gradient, self, local)
        rows.set_shape(keys_.shape.concatenate([self.dim]))
        return rows

    def ids_of_rows(self, rows: tf.Tensor) -> tf.Tensor:
        return rows_by_python.keys_of(self.number, rows)

    def rows_of_ids(self, ids: tf.Tensor) -> tf.Tensor:
        return rows_by_python.rows_of(self.number, tf.cast(ids, tf.int64))

    def refuse(self, way: str) -> NoReturn:
        saves = " Save a model with it by collective.keras.callbacks.Checkpoint."
        raise TableError(
            f"{way} of table '{self.op.name}' isn't possible: it is dynamic: only keys that have "
            "come have rows, each on its owner. Look up rows by their keys "
            "(tf.nn.embedding_lookup, embedding_lookup_sparse, safe_embedding_lookup_sparse, "
            "tf.gather; pooled lookups take ragged keys as ids.to_sparse()), or go through all "
            "with table.export(session) and table.import_(session, keys, rows)."
            + (saves if self.is_eager else "")
        )

    # -- All rows

    def count(self) -> tf.Tensor:
        """Returns the number of rows on this rank, int64 scalar, at some moment of the run."""
        with tf.control_dependencies([self._gate()]):
            return (dynamic_rows if self.compiled else rows_by_python).count(self.number)

    def total_count(self) -> tf.Tensor:
        """Returns the number of rows on all ranks, int64 scalar.

        Every rank runs it, like a training step, though it isn't one.
        """
        name = collectives.unique_name(f"{self.op.name}/total_count")
        return collectives.allreduce_sum([self.count()], name, self._gate())[0]

    @staticmethod
    def _gate() -> tf.Tensor:
        if collectives.size() == 1:
            return tf.constant(0)
        return gate.gates_of(tf.get_default_graph()).of_collective([]).zero

    def store(self, session: Any) -> row_store.Store:
        """Returns the rows that `session` holds.

        Raises:
            tf.errors.FailedPreconditionError: it isn't initialized.
        """
        store: row_store.Store = row_store.registered(self.number_in(session))
        return store

    def local_count(self, session: Any = None) -> int:
        """Returns the number of rows on this rank in `session`."""
        return len(self.store(session))

    def ascending(self, session: Any, block: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields keys and local rows in `session`, by ascending keys: int64 [b], b <= `block`."""
        return self.store(session).ascending(block)

    def export(
        self,
        session: Any = None,
        block: int = 1 << 16,
        frequencies: bool = False,
        last_used: bool = False,
    ) -> Iterator[tuple[np.ndarray, ...]]:
        """Yields this rank's keys, ascending, and their rows: (int64 [b], [b, D]) with b <= block.

        With `frequencies`, the third element is how often training looked up each key, int64 [b].

        Args:
            session: a session, also a `MonitoredSession`. Rows that it changes meanwhile may have
                old or new values.
            block: rows at a time, which bounds the memory.
            frequencies: whether to yield these. A key that was imported came 0 times.
            last_used: whether to yield also the global steps of the runs that used the rows last,
                int64 [b]; 0 if none did.

        Raises:
            ValueError: no option of the table's policy needs them.
        """
        if frequencies and not self.counts_keys:
            raise ValueError(
                f"table '{self.op.name}' doesn't count its keys: "
                "collective.TablePolicy(filter_freq=…) of more than 1 does."
            )
        if last_used and self.last_used is None:
            raise ValueError(f"table '{self.op.name}' doesn't know when its rows were used last.")
        session = raw_session(session)
        store = self.store(session)
        columns = []
        if frequencies:
            columns.append(self.admission.frequencies.column(session))
        if last_used:
            self.last_used.settle(session, store.count_in_memory)
            columns.append(self.last_used.column(session))
        for keys, local in store.ascending(block):
            values, *others = store.read([store.values, *columns], keys, local)
            yield (keys, values, *(numbers[:, 0] for numbers in others))

    def import_(self, session: Any, keys_: Any, rows: Any) -> None:
        """Sets the rows of keys, block by block; every rank keeps the keys that it owns.

        An existing key's row is replaced and its slots are kept; a new key's slots start fresh.
        Nothing else changes.

        Args:
            session: a session, also a `MonitoredSession`.
            keys_: [b] int64. Ranks may pass the same block or different blocks; if a key is given
                twice, the last row counts.
            rows: [b, D].

        Raises:
            ValueError: the shapes don't fit, or keys aren't int64.
        """
        keys_, rows = int64_keys(keys_, self.op.name), np.asarray(rows)
        if keys_.ndim != 1 or rows.shape != (len(keys_), self.dim):
            raise ValueError(
                f"table '{self.op.name}': import_ takes keys [b] and rows [b, {self.dim}], not "
                f"{list(keys_.shape)} and {list(rows.shape)}."
            )
        is_owned, session = self._is_owned(keys_), raw_session(session)
        store = self.store(session)
        store.put(keys_[is_owned], rows[is_owned])
        if self.last_used is not None:
            self.last_used.begin(session)
        if self.policy.storage is not None:
            store.limit_memory(self.columns_of_slots(session))

    def lookup_keys(self, session: Any, keys_: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns those of `keys_` that have rows on this rank, and copies of the rows.

        No key is inserted, nor does it count as used.

        Args:
            session: a session, also a `MonitoredSession`.
            keys_: [b] int64, of any rank.

        Returns:
            (int64 [k], [k, D]), in the order of `keys_`.

        Raises:
            ValueError: keys aren't int64.
        """
        store = self.store(raw_session(session))
        keys_, local = self._found(store, keys_)
        return keys_, store.read([store.values], keys_, local)[0]

    def remove(self, session: Any, keys_: Any) -> int:
        """Removes keys, with their rows and slots, and gives the memory back.

        A key that comes back starts as a new one does. Every rank removes the keys that it owns; a
        key that has no row is left out. Nothing else changes. No step may run meanwhile.

        Args:
            session: a session, also a `MonitoredSession`; None for a table that was made eagerly,
                whose gradients and lookups from before are refused then.
            keys_: [b] int64. Ranks may pass the same keys or each its own.

        Returns:
            How many keys this rank has removed.

        Raises:
            TableError: gradients of some batches wait for the update of scope(local_steps=…).
            ValueError: keys aren't int64.
        """
        keys_ = int64_keys(keys_, self.op.name)
        return self._removed(
            session, keys_, lambda rows, slots: rows.remove_keys(self._found(rows, keys_)[0], slots)
        )

    def clear(self, session: Any) -> int:
        """Removes all keys of this rank from `session`, as `remove` does. Returns how many."""
        return self._removed(session, None, lambda store, slots: store.clear(slots))

    def _removed(self, session: Any, keys_: Any, remove: Callable[..., int]) -> int:
        """Removes keys, all of them if `keys_` is None, from what `session` holds."""
        session = raw_session(session)
        waiting_gradients.check_none(self, session)
        store = self.store(session)
        removed = remove(store, self.columns_of_slots(session))
        if self.admission is not None:
            store.keys.forget(keys_)
        self.moves += session is None
        return removed

    def statistics(self, session: Any = None) -> TableStatistics:
        """Returns how many rows this rank has in `session`, and how many were added and removed.

        Args:
            session: a session, also a `MonitoredSession`.
        """
        store = self.store(raw_session(session))
        # A table on a device uses the host's memory only for saves.
        slots = [slot for slot in self.slots if slot.on_device or self.bridge is None]
        return store.tally.statistics(store, [self, *slots])

    def columns_of_slots(self, session: Any) -> list[RowColumn]:
        """Returns the memory of all slots that are initialized in `session`."""
        columns = []
        for slot in self.slots:
            with contextlib.suppress(tf.errors.FailedPreconditionError):
                columns.append(slot.column(session))
        return columns

    def _found(self, store: row_store.Store, keys_: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns those of `keys_` that have rows in `store`, and the rows."""
        keys_ = int64_keys(keys_, self.op.name)
        if keys_.ndim != 1:
            raise ValueError(f"table '{self.op.name}': keys are [b], not {list(keys_.shape)}.")
        keys_ = keys_[self._is_owned(keys_)]
        rows = store.locate(keys_)
        return keys_[rows > 0], rows[rows > 0]

    def _is_owned(self, keys_: np.ndarray) -> np.ndarray:
        return self.placement.owner(keys_) == collectives.rank()

    def initialize_slot_rows(self, session: Any, slots: Sequence[Any]) -> None:
        """Gives rows that `slots` lack their initial value before they are read in `session`."""
        count = self.store(session).count_in_memory
        for slot in slots:
            slot.settle(session, count)

    def loading(self, slots: Sequence[Any]) -> Loading:
        """Begins to load rows and those of `slots`: `add` them, then `assign` all at once."""
        return Loading(self, slots)


def _device_row_store() -> Any:
    from collective.tables.rows import device_row_store  # The import takes a while.

    return device_row_store


for _method, _way in {**WHOLE_VALUE_METHODS, **REFUSED_METHODS}.items():
    setattr(DynamicTable, _method, refusing_method(_method, _way))


def int64_keys(given: Any, table: str) -> np.ndarray:
    """Returns the keys that were passed to a method of a dynamic table, as int64.

    Args:
        given: an array or array-like. An empty one may have any type.
        table: the table's name, for errors.

    Raises:
        ValueError: they aren't whole numbers, or are beyond int64.
    """
    keys = np.asarray(given)
    if not keys.size:
        return keys.astype(np.int64)
    if keys.dtype.kind not in "iu":
        is_text = keys.dtype.kind in "SU" or isinstance(keys.flat[0], (str, bytes))
        fix = _STRINGS if is_text else "Give whole numbers: keys.astype(np.int64)"
        raise ValueError(f"table '{table}': keys are of an integer type, not {keys.dtype}. {fix}.")
    if keys.dtype == np.uint64 and (largest := int(keys.max())) >= 2**63:
        raise ValueError(
            f"table '{table}': keys are int64, up to 2**63 - 1, not {largest} of {keys.dtype}. "
            "keys.view(np.int64) has the keys that lookups make of such ids."
        )
    return keys.astype(np.int64, copy=False)


@tf.RegisterGradient(_ADMITTED_GATHER)
def _admitted_gradient(op: tf.Operation, gradient: Any) -> tuple[tf.IndexedSlices, None]:
    """Drops the gradients of keys without rows."""
    slices = _gather_gradient(op, gradient, op.inputs[1].op.inputs[0])[0]
    return slices, None


@tf.RegisterGradient(_GATHER)
def _gather_gradient(
    op: tf.Operation, gradient: Any, admitted: tf.Tensor | None = None
) -> tuple[tf.IndexedSlices, None]:
    if graphs.is_function(op.graph) or op._get_control_flow_context() is not None:
        raise TableError(
            f"A lookup in the dynamic table '{_outside(op.inputs[0]).op.name}' inside tf.cond, "
            "tf.while_loop or tf.function has no gradient: look up outside, and choose among the "
            "rows inside."
        )
    if isinstance(gradient, tf.IndexedSlices):
        gradient = tf.math.unsorted_segment_sum(
            gradient.values, gradient.indices, tf.shape(op.outputs[0])[0]
        )
    rows = op.inputs[1]
    if admitted is not None:
        has_row = tf.not_equal(admitted, -1)
        gradient = tf.boolean_mask(gradient, has_row)
        rows = dynamic_rows.updated(tf.boolean_mask(admitted, has_row))
    # Without a dense shape the gradient can't be made a matrix, which would be as large as all
    # reserved memory.
    return shard_gradients.of_shard(tf.IndexedSlices(gradient, rows, None)), None


def _outside(x: tf.Tensor) -> tf.Tensor:
    """Returns the tensor outside of a function or a branch that `x` captures."""
    while hasattr(x.graph, "captures"):
        outer = next((outer for outer, inner in x.graph.captures if inner is x), None)
        if outer is None:
            break
        x = outer
    return x
