"""Makes optimizers' slots of tables, and updates dynamic tables.

A static table's slots start in memory of their own. TensorFlow's constant initializers would keep
an initial value as large as the shard with the graph, and the first update would copy it.

For a dynamic table, an optimizer makes its slots for one row, [1, D], which stands for all rows. If
TensorFlow's own update (Adam's) goes over the whole slot, this module goes over the rows in use in
blocks, with the same arithmetic.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf

from collective.errors import TableError
from collective.ops.communication import collectives
from collective.ops.counting import counted
from collective.ops.graph import device_scopes, training_flag
from collective.ops.placement import static
from collective.ops.rows import dynamic_rows
from collective.ops.updates import reduced_updates
from collective.tables import dense_view
from collective.tables.dynamic_table import DynamicTable
from collective.tables.rows import initializers, row_store, rows_in_file
from collective.tables.table import Sharded, in_shard_view, mark_shard, shard_view
from collective.tables.updates import update_kernels, weight_bound
from collective.tables.updates.slots import Slot
from collective.tensorflow_internals.optimizers import adam, optimizer
from collective.tensorflow_internals.variables import variable_scope

BLOCK = 1 << 20  # Elements of a table that a dense update processes at once.

KEYS_NOT_INSERTED = (
    "is updated by a run that no session of strategy.scope() runs: the keys of its lookups were "
    "not inserted. Create the session, and run it, inside `with strategy.scope():`."
)


def create_slot_var(
    original: Any,
    primary: Any,
    val: Any,
    scope: str,
    validate_shape: bool,
    shape: Any,
    dtype: Any,
    **kwargs: Any,
) -> Any:
    """Makes slots, in place of `slot_creator._create_slot_var`.

    A dynamic table gets a `Slot`. A static table gets a variable that is sharded like the table,
    also if a script makes it before the update with the whole table's shape. Rows of a slot may
    have any width. A slot that is one number for the whole table is a replicated variable.

    The settings of an open `variable_scope` (a partitioner, a regularizer, a getter and so on) are
    for the script's variables: they don't affect a table's slots.

    Raises:
        TableError: an optimizer's slot of a table has another shape.
    """
    if not isinstance(primary, (DynamicTable, Sharded)):
        return original(primary, val, scope, validate_shape, shape, dtype, **kwargs)
    with _scope_without_settings():
        return _create_slot(original, primary, val, scope, validate_shape, shape, dtype, **kwargs)


def _scope_without_settings() -> Any:
    """Returns a scope with the current scope's name and no settings for variables."""
    current = tf.get_variable_scope()
    plain = tf.VariableScope(
        reuse=False, name=current.name, name_scope=current.original_name_scope, use_resource=True
    )
    return tf.variable_scope(plain, auxiliary_name_scope=False)


def _create_slot(
    original: Any,
    primary: Any,
    val: Any,
    scope: str,
    validate_shape: bool,
    shape: Any,
    dtype: Any,
    **kwargs: Any,
) -> Any:
    slot_shape = tf.TensorShape(val.shape if shape is None else shape)
    if not isinstance(primary, DynamicTable):
        if (
            slot_shape.rank != 2
            # Its shape is the shard's inside apply_gradients.
            or not slot_shape[:1].is_compatible_with(primary.shape[:1])
        ):
            if in_shard_view():
                _refuse_shape(primary, slot_shape)
            return original(primary, val, scope, validate_shape, shape, dtype, **kwargs)
        rows, dim = slot_shape.as_list()
        initial_value = val
        if dtype is None and not callable(val):
            dtype = val.dtype.base_dtype
        if not in_shard_view() or initializers.is_constant(val):
            part = (
                (static(1), 0) if in_shard_view() else (primary.row_placement, collectives.rank())
            )
            shape = [rows, dim]

            def initial_value(*_: Any, **__: Any) -> tf.Tensor:
                return initializers.shard(val, (rows, dim), dtype, scope, *part)

        with shard_view(), tf.variable_creator_scope(functools.partial(sharded_as, primary, dim)):
            return original(primary, initial_value, scope, validate_shape, shape, dtype, **kwargs)

    if slot_shape.rank == 0:
        return original(primary, val, scope, validate_shape, shape, dtype, **kwargs)

    def create(next_creator: Any, **arguments: Any) -> Slot:
        del next_creator
        first_row = arguments["initial_value"]
        if callable(first_row):
            first_row = first_row()
        return Slot(
            primary,
            tf.convert_to_tensor(first_row),
            arguments["name"],
            arguments.get("collections"),
        )

    with tf.variable_creator_scope(create):
        return variable_scope.get_variable(
            scope,
            initializer=val,
            trainable=False,
            use_resource=True,
            dtype=dtype,
            shape=shape if callable(val) else None,
        )


def _refuse_shape(table: Sharded, slot_shape: tf.TensorShape) -> None:
    """Refuses a slot that is for the whole table but isn't one number.

    On a rank with a single row of the table, the shape [1, ...] is also that of a slot by row:
    ranks would differ in whether the slot is sharded, and a checkpoint would mistake it for a part
    of one.

    Raises:
        TableError: the slot has another shape than [].
    """
    if not slot_shape.rank:
        return
    rows = counted(table.shard_shape.as_list()[0], "row")
    raise TableError(
        f"table '{table.op.name}' has {rows} on this rank, but its slot "
        f"'{tf.get_variable_scope().name}' has the shape {slot_shape.as_list()}. A slot of a table "
        "has a row for each of the table's, of any width, or is one number, []. Make it of another "
        "shape by the optimizer's _create_non_slot_variable, or make the table outside "
        "embedding_scope(): it is then whole on every rank."
    )


def sharded_as(table: Sharded, dim: int, next_creator: Any, **arguments: Any) -> Sharded:
    """Creates a slot with rows [dim] that is sharded as `table` is: a variable creator.

    The initial value is that of this rank's rows.
    """
    del next_creator
    if tf.executing_eagerly():
        arguments["initial_value"] = _own_rows(table, arguments["initial_value"])
    slot = Sharded(
        rows=table.rows,
        dim=dim,
        placed=table.row_placement,
        **{
            key: arguments.get(key)
            for key in (
                "initial_value",
                "name",
                "dtype",
                "trainable",
                "collections",
                "validate_shape",
            )
        },
    )
    mark_shard(slot, table)
    return slot


def _own_rows(table: Sharded, value: Any) -> Any:
    """Returns the first value of a slot's shard; a checkpoint has that of all rows."""
    value = tf.convert_to_tensor(value() if callable(value) else value)
    is_whole = value.shape[0] == table.rows != table.shard_shape[0]
    return dense_view.local_rows(table, value) if is_whole else value


def get_processor(original: Any, v: Any) -> Any:
    """Returns what applies a gradient to `v`: in place of `optimizer._get_processor`."""
    processor = _Processor(v) if isinstance(v, DynamicTable) else original(v)
    return weight_bound.bounded(update_kernels.checked(processor, v), v)


class _Processor(optimizer._OptimizableVariable):
    def __init__(self, table: DynamicTable):
        self._table = table

    def target(self) -> DynamicTable:
        return self._table

    def update_op(self, optimizer_: Any, gradient: Any) -> Any:
        table = self._table
        if not isinstance(gradient, tf.IndexedSlices):
            raise TableError(
                f"The gradient of the dynamic table '{table.op.name}' must stay IndexedSlices; "
                f"'{gradient.name}' is a matrix."
            )
        if table.constraint is not None:
            raise RuntimeError(
                f"table '{table.op.name}': a constraint is not possible for a sparsely updated "
                "variable."
            )
        all_rows = _goes_over_all_rows(optimizer_)
        if all_rows:
            rows_in_file.check_all_rows_are_not_updated(table, optimizer_)
        settled, count = settle(table, gradient, all_rows)
        with (
            tf.device("/cpu:0") if table.bridge is None else contextlib.nullcontext(),
            tf.control_dependencies([settled]),
        ):
            # Other lookups may insert keys meanwhile, for whose rows slots have no memory.
            table.slot_row_count = count
            try:
                return optimizer_._resource_apply_sparse_duplicate_indices(
                    gradient.values, table, gradient.indices
                )
            finally:
                table.slot_row_count = None


def settled(gradient: tf.IndexedSlices, table: DynamicTable) -> tf.IndexedSlices:
    """Returns the gradient of a dynamic table, after slots have its rows."""
    with tf.control_dependencies([settle(table, gradient, False)[0]]):
        values = tf.identity(gradient.values)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def settle(
    table: DynamicTable, gradient: tf.IndexedSlices, needs_count: bool
) -> tuple[Any, tf.Tensor | None]:
    """Refuses an update in a run that doesn't train; gives slots the gradient's rows.

    This covers the slots of all optimizers, since one may let another do its updates. On a device,
    there is memory only for announced rows; in the host's memory, rows of zeros need no
    announcement. For a table with a file, all slots count towards its memory.

    Returns:
        (what the update waits for, the number of rows for which slots have values, or None if it
        isn't needed).
    """
    is_training = training_flag.flag(tf.get_default_graph())
    refusal = f"dynamic table '{table.op.name}' {KEYS_NOT_INSERTED}"
    has_file = table.policy.storage is not None
    slots = [slot for slot in table.slots if slot.on_device or has_file or not slot.zero]
    needs_count = needs_count or bool(slots)
    waited, rows = gradient.values, gradient.indices
    if table.compiled:
        waited, rows = reduced_updates.before_sum(waited, rows)
    with device_scopes.on_host(), tf.control_dependencies([waited, rows]):
        if table.compiled:
            settled = dynamic_rows.settle_slots(
                is_training,
                rows,
                table.number,
                [slot.number for slot in slots],
                [slot.handle for slot in slots],
                refusal,
            )
            return settled, settled if needs_count else None
        keys_inserted = tf.Assert(is_training, [refusal])
        if not needs_count:
            return keys_inserted, None
        with tf.control_dependencies([keys_inserted]):
            count = _initialized_slot_rows(table, gradient, slots)
        return count, count


def _initialized_slot_rows(
    table: DynamicTable, gradient: tf.IndexedSlices, slots: Sequence[Slot]
) -> tf.Tensor:
    """Gives slots their initial values for all rows of a gradient.

    Returns: int64 scalar, the number of rows for which slots have values.
    """
    # The size makes it wait for the keys: in a branch, TensorFlow drops the control input that it
    # has for them.
    with device_scopes.anywhere():  # Else all indices would come to the host.
        size = tf.size(gradient.indices)
    inputs = [
        size,
        tf.identity(table.number),
        *(slot.number for slot in slots),
    ]
    return tf.reshape(tf.numpy_function(_initialize_slot_rows, inputs, tf.int64, stateful=True), [])


def _initialize_slot_rows(_: np.ndarray, number: np.ndarray, *slots: np.ndarray) -> np.int64:
    count = len(row_store.registered(int(number)))
    for slot in slots:
        row_store.registered(int(slot)).initialize_rows(count)
    return np.int64(count)


def _goes_over_all_rows(optimizer_: Any) -> bool:
    """Tells whether an optimizer updates like Adam, including rows without a gradient."""
    name = "_apply_sparse_shared"
    return isinstance(optimizer_, adam.AdamOptimizer) and (
        getattr(type(optimizer_), name) is getattr(adam.AdamOptimizer, name)
    )


def update_by_adam(
    optimizer_: Any, values: tf.Tensor, table: DynamicTable, rows: tf.Tensor
) -> tf.Operation:
    """Updates like `AdamOptimizer._apply_sparse_shared`, in the same order.

    The moments decay in all rows, and all rows move.

    Args:
        optimizer_: an `AdamOptimizer`.
        values: [K, D] the gradient.
        table: a table whose `slot_row_count` is known.
        rows: [K] local rows, each once.
    """

    def scalar(x: Any) -> tf.Tensor:
        return tf.cast(x, table.dtype)

    powers, beta1, beta2 = (
        optimizer_._get_beta_accumulators(),
        scalar(optimizer_._beta1_t),
        scalar(optimizer_._beta2_t),
    )
    rate = scalar(optimizer_._lr_t) * tf.sqrt(1 - scalar(powers[1])) / (1 - scalar(powers[0]))
    epsilon = scalar(optimizer_._epsilon_t)
    m, v = optimizer_.get_slot(table, "m"), optimizer_.get_slot(table, "v")

    def gather(x: Any, rows: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.ResourceGather(resource=x.handle, indices=rows, dtype=x.dtype)

    def decay(block: tf.Tensor) -> list[tf.Operation]:
        return [
            tf.raw_ops.ResourceScatterUpdate(
                resource=x.handle, indices=block, updates=gather(x, block) * beta
            )
            for x, beta in ((m, beta1), (v, beta2))
        ]

    def move(block: tf.Tensor) -> list[tf.Operation]:
        step = rate * gather(m, block) / (tf.sqrt(gather(v, block)) + epsilon)
        return [tf.raw_ops.ResourceScatterSub(resource=table.handle, indices=block, updates=step)]

    with tf.control_dependencies([_over_blocks(table.slot_row_count, table.dim, decay)]):
        added = [
            tf.raw_ops.ResourceScatterAdd(
                resource=m.handle, indices=rows, updates=values * (1 - beta1)
            ),
            tf.raw_ops.ResourceScatterAdd(
                resource=v.handle, indices=rows, updates=(values * values) * (1 - beta2)
            ),
        ]
    with tf.control_dependencies(added):
        return _over_blocks(table.slot_row_count, table.dim, move).op


def _over_blocks(
    count: tf.Tensor, dim: int, work: Callable[[tf.Tensor], list[tf.Operation]]
) -> tf.Tensor:
    """Calls `work` for the local rows 1 … count, block by block."""
    step = max(1, BLOCK // dim)

    def body(first: tf.Tensor, last: tf.Tensor) -> list[tf.Tensor]:
        after = tf.minimum(first + step, last)
        with tf.control_dependencies(work(tf.range(first, after))):
            return [tf.identity(after), tf.identity(last)]

    start = tf.identity(count) + 1  # After the control dependencies.
    return tf.while_loop(
        lambda first, last: first < last,
        body,
        [tf.ones_like(start), start],
        parallel_iterations=1,
        back_prop=False,
    )[0]
