"""Makes one operation of many updates of rows.

In host memory, the operation that sums the gradients of tables updates their rows, too:

    CollectiveReduceRows ──sums──► CollectiveSparseUpdate, one for each table
    CollectiveSparseReduceUpdate: both, table by table, so that no sum leaves the cache

Where one rank has all rows of tables on a GPU, it sums gradients of lookups only once:

    CollectivePoolGradient ──rows' gradients──► CollectiveSparseReduceUpdate
    CollectiveSparsePoolUpdate: both, so that no gradient of a row is written

Inside `fusing`, an update by a sum waits for the others. At the end, one operation computes the sum
and all updates by it, if nothing else uses the sum: not if a gradient is clipped or shown, for
example. If the sum is used later, it is computed once more there. The results are the same, bit for
bit.

On a GPU other updates (by no such sum, or by a sum that is used elsewhere, too) wait for each other
if they have the same rule and numbers: one CollectiveSparseUpdate carries them out in one kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops import native_library
from collective.ops.exchange.dispatch import operations
from collective.ops.exchange.embedding_bag_gradients import LOOKUPS, pooled_inputs
from collective.ops.graph import graph_analysis, host_inputs

_LAYOUT = ("T", "ranks", "section_tables", "kinds", "dims", "pooled", "weighted", "counted")


@dataclasses.dataclass(frozen=True)
class RowUpdate:
    """Describes the update of one table's rows.

    Attributes:
        rule: its name, see `sparse_updates.update`.
        table, slots: variables of a shard, float32.
        numbers: float32 scalars: the learning rate, …
        gradient: float32 [K, D].
        rows: int64 [K], each at most once.
        used: for a rule that updates all rows, the last existing row, int64 scalar; see
            `sparse_updates.adam`. None for other rules.
        on_device: whether kernels of a GPU update the rows.
        bound: on a device, the bound of the rows' elements after the update.
    """

    rule: str
    table: Any
    slots: Sequence[Any]
    numbers: Sequence[tf.Tensor]
    gradient: tf.Tensor
    rows: tf.Tensor
    used: tf.Tensor | None = None
    on_device: bool = False
    bound: float = math.inf

    def alone(self) -> tf.Operation:
        """Makes the operation that updates only this table."""
        return _joined([self])


class _Sum(NamedTuple):
    """Says which table's gradient, and of which CollectiveReduceRows, a tensor is."""

    op: tf.Operation
    table: int


class _Pending(NamedTuple):
    """Holds an update that waits; `done` stands for it, after its control dependencies. `sum` is
    None for an update on a device by another gradient.
    """

    update: RowUpdate
    sum: _Sum | None
    done: tf.Operation

    def kind(self) -> tuple[str, ...]:
        """Says what updates must have in common for one operation to carry them out."""
        return (self.update.rule, *(number.name for number in self.update.numbers))


_current = threading.local()


@contextlib.contextmanager
def fusing() -> Iterator[None]:
    """Fuses the updates made inside with the sums of their gradients, or with each other."""
    previous, _current.pending = getattr(_current, "pending", None), []
    try:
        yield
        by_sum: dict[tf.Operation, list[_Pending]] = {}
        by_kind: dict[tuple[str, ...], list[_Pending]] = {}
        for pending in _current.pending:
            if pending.sum is not None:
                by_sum.setdefault(pending.sum.op, []).append(pending)
        for op, of_sum in list(by_sum.items()):
            if not _is_fusible(op, of_sum) and of_sum[0].update.on_device:
                del by_sum[op]
        for op, of_sum in by_sum.items():
            _build(
                of_sum,
                functools.partial(_fused, op, of_sum) if _is_fusible(op, of_sum) else None,
            )
        for pending in _current.pending:
            if pending.sum is None or pending.sum.op not in by_sum:
                by_kind.setdefault(pending.kind(), []).append(pending)
        for of_kind in by_kind.values():
            updates = [pending.update for pending in of_kind]
            _build(
                of_kind,
                None if _wait_for_each_other(of_kind) else functools.partial(_joined, updates),
            )
    finally:
        _current.pending = previous


def apply(update: RowUpdate) -> tf.Operation:
    """Makes the operation of an update; inside `fusing`, an operation that stands for it."""
    pending = getattr(_current, "pending", None)
    if pending is None:
        return update.alone()
    found = _sum_of(update.gradient, update.rows)
    if found is None and not update.on_device:
        return update.alone()
    done = tf.no_op()
    pending.append(_Pending(update, found, done))
    return done


def keep_within(bound: float, done: tf.Operation) -> bool:
    """Has an update that `apply` returned keep the elements of its rows in [-bound, bound].

    Returns:
        False if it can't: only updates on a device that still wait for others can.
    """
    pending = getattr(_current, "pending", None) or []
    for number, one in enumerate(pending):
        if one.done is done and one.update.on_device:
            update = dataclasses.replace(one.update, bound=bound)
            pending[number] = one._replace(update=update)
            return True
    return False


def before_sum(values: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the terms of the sum that is a table's gradient, without waiting for the sum.

    Args:
        values: [K, D].
        rows: [K].

    Returns:
        (the gradients of all tables as the ranks sent them, the table's rows with repetitions);
        `values` and `rows` themselves if the gradient isn't such a sum.
    """
    found = _sum_of(values, rows)
    if found is None:
        return values, rows
    inputs = found.op.inputs
    return inputs[0], inputs[1 + found.op.get_attr("T") + found.table]


def _sum_of(values: tf.Tensor, rows: tf.Tensor) -> _Sum | None:
    """Returns the sum that is, unchanged, a table's gradient; None if the gradient isn't one."""
    op = rows.op
    if op.type != "CollectiveReduceRows" or op.graph is not tf.get_default_graph():
        return None
    table = rows.value_index - op.get_attr("T")
    # TensorFlow's optimizers make each gradient of an operation wait for the others.
    while values.op.type == "Identity" and _waits_only_for(values.op, op):
        values = values.op.inputs[0]
    return _Sum(op, table) if values.op is op and values.value_index == table else None


def _waits_only_for(identity: tf.Operation, op: tf.Operation) -> bool:
    return all(
        waited is op or (waited.type == "NoOp" and _waits_only_for(waited, op))
        for waited in identity.control_inputs
    )


def _build(pending: Sequence[_Pending], fuse: Callable[[], tf.Operation] | None) -> None:
    """Makes the operation of the updates with `fuse`, or one for each if that is None."""
    if fuse is not None:
        # All are in the scope of the first: a profile counts its operations as the optimizer's.
        waited = dict.fromkeys(x for each in pending for x in each.done.control_inputs)
        with _in_place_of(pending[0], waited):
            fused = fuse()
        for each in pending:
            each.done._add_control_input(fused)
        return
    for each in pending:
        with _in_place_of(each, each.done.control_inputs):
            alone = each.update.alone()
        each.done._add_control_input(alone)


@contextlib.contextmanager
def _in_place_of(pending: _Pending, waited: Any) -> Iterator[None]:
    scope, _, _ = str(pending.done.name).rpartition("/")
    graph, handle = tf.get_default_graph(), pending.update.table.handle
    with contextlib.ExitStack() as stack:
        stack.enter_context(tf.name_scope(f"{scope}/" if scope else None))
        # In a traced function, what the operation updates decides.
        if tf.is_symbolic_tensor(handle):
            stack.enter_context(graph.colocate_with(handle.op, ignore_existing=True))
        stack.enter_context(tf.control_dependencies(list(waited)))
        yield


def _is_fusible(op: tf.Operation, pending: Sequence[_Pending]) -> bool:
    tables = {x.sum.table for x in pending if x.sum is not None}
    if len({x.kind() for x in pending}) > 1 or len(tables) < len(pending):
        return False
    if any(op.get_attr("max_norms")) or op._get_control_flow_context() is not None:
        return False
    return not _is_used(op) and not _wait_for_each_other(pending)


def _pool_gradient_of(op: tf.Operation, tables: Sequence[int]) -> tf.Operation | None:
    """Returns the CollectivePoolGradient that can update `tables` in place of a sum `op`.

    That is so if one rank has all rows, each of which came back once, and if each has a gradient,
    which nobody else needs.
    """
    if op.get_attr("ranks") > 1 or any(op.get_attr("kinds")) or any(op.get_attr("pooled")):
        return None
    if op.get_attr("section_tables") != sorted(tables) or not op.get_attr("H"):
        return None
    gradient = op.inputs[0]
    while gradient.op.type == "Identity" and _waits_only_for(gradient.op, gradient.op.inputs[0].op):
        gradient = gradient.op.inputs[0]
    made = gradient.op
    if made.type != "CollectivePoolGradient" or made._get_control_flow_context() is not None:
        return None
    if any(made.get_attr("max_norms")) or made.get_attr("G") < made.get_attr("M"):
        return None
    return None if _is_used(made, but=op) else made


def _wait_for_each_other(pending: Sequence[_Pending]) -> bool:
    """Tells whether an update waits for another. Nothing older than the first can do so."""
    done = {x.done for x in pending}
    first = min(x._id for x in done)
    starts = [x for each in pending for x in each.done.control_inputs]
    given = [
        x
        for each in pending
        for x in (
            *each.update.numbers,
            each.update.used,
            *((each.update.gradient, each.update.rows) if each.sum is None else ()),
        )
    ]
    starts += [x.op for x in given if x is not None]
    return bool(done & graph_analysis.walk(starts, stop=lambda x: x._id < first))


def _is_used(op: tf.Operation, but: tf.Operation | None = None) -> bool:
    """Tells whether anything but `but` is computed from an operation's outputs, or waits for it."""
    stack, seen = [op], {op}
    while stack:
        reached = stack.pop()
        users = {user for x in reached.outputs for user in x.consumers()}
        for user in users.union(reached._control_outputs) - seen - {but}:
            if user.type not in ("Identity", "NoOp"):
                return True
            seen.add(user)
            stack.append(user)
    return False


def _fused(op: tf.Operation, pending: Sequence[_Pending]) -> tf.Operation:
    inputs, count = op.inputs, op.get_attr("T")
    tables = [x.sum.table for x in pending if x.sum is not None]
    if pending[0].update.on_device and (made := _pool_gradient_of(op, tables)) is not None:
        return _fused_with_pool(op, made, dict(zip(tables, (x.update for x in pending))))
    updates = [x.update for x in pending]
    rows = [inputs[1 + count + table] for table in tables]
    message, headers = inputs[1 + 2 * count : 3 + 2 * count], inputs[3 + 2 * count :]
    attributes = {name: op.get_attr(name) for name in (*_LAYOUT, "scale")}
    fused: tf.Operation = _operations(updates).collective_sparse_reduce_update(
        *_given(updates),
        inputs[0],
        rows,
        *message,
        headers,
        **_attributes(updates),
        updated=tables,
        **attributes,
    )
    return fused


def _fused_with_pool(
    op: tf.Operation, pool_gradient: tf.Operation, updates: dict[int, RowUpdate]
) -> tf.Operation:
    """Makes the operation of updates, by table, by what `op` sums of the gradient of a pool."""
    ordered = [updates[table] for table in range(len(updates))]
    given = pooled_inputs(pool_gradient)
    with tf.control_dependencies(pool_gradient.control_inputs):
        fused: tf.Operation = _operations(ordered).collective_sparse_pool_update(
            *_given(ordered),
            op.inputs[1 + len(ordered) : 1 + 2 * len(ordered)],
            given.positions,
            given.samples,
            given.weights,
            given.gradients,
            given.counts,
            **_attributes(ordered),
            **{name: pool_gradient.get_attr(name) for name in (*LOOKUPS, "members")},
            scale=op.get_attr("scale"),
        )
    return fused


def _joined(updates: Sequence[RowUpdate]) -> tf.Operation:
    joined: tf.Operation = _operations(updates).collective_sparse_update(
        *_given(updates),
        [update.gradient for update in updates],
        [update.rows for update in updates],
        **_attributes(updates),
    )
    return joined


def _operations(updates: Sequence[RowUpdate]) -> Any:
    if not updates[0].on_device:
        return native_library.on_host()
    host_inputs.keep_on_host(updates[0].numbers)
    return operations()


def _given(updates: Sequence[RowUpdate]) -> list[Any]:
    """Returns the first inputs of both operations: tables, slots, numbers and `used`."""
    return [
        [update.table.handle for update in updates],
        [slot.handle for update in updates for slot in update.slots],
        updates[0].numbers,
        [update.used for update in updates if update.used is not None],
    ]


def _attributes(updates: Sequence[RowUpdate]) -> dict[str, Any]:
    bounds = [update.bound for update in updates]
    is_bounded = any(bound < math.inf for bound in bounds)
    return {"rule": updates[0].rule, "bounds": bounds if is_bounded else []}
