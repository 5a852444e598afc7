"""Lets the operation that sums the gradients of tables update their rows, too.

    CollectiveReduceRows ──sums──► CollectiveSparseAdagrad, one for each table
    CollectiveSparseReduceAdagrad: both, table by table, so that no sum leaves the cache

Inside of `fusing`, an update by a sum waits for the others. At its end one operation makes the sum
and all updates by it, if nothing else uses the sum: not if a gradient is clipped, say, or shown.
Where it is used later, it is made once more there. The results are the same, bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from collective.ops import graph_analysis, native_library
from collective.ops.op_attributes import attribute

_LAYOUT = ("T", "ranks", "section_tables", "kinds", "dims", "pooled", "weighted", "counted")


@dataclasses.dataclass(frozen=True)
class RowUpdate:
    """Describes the update of one table's rows.

    Attributes:
        rule: ends the names of the operations that compute it: 'Adagrad', …
        table, slots: variables of a shard, float32.
        numbers: float32 scalars: the learning rate, …
        gradient: float32 [K, D].
        rows: int64 [K], each at most once.
        used: for a rule that updates all rows, the last row that there is, int64 scalar; see
            `sparse_updates.adam`. None for other rules.
    """

    rule: str
    table: Any
    slots: Sequence[Any]
    numbers: Sequence[tf.Tensor]
    gradient: tf.Tensor
    rows: tf.Tensor
    used: tf.Tensor | None = None

    def alone(self) -> tf.Operation:
        """Makes the operation that updates this table only."""
        used = [] if self.used is None else [self.used]
        variables = [variable.handle for variable in (self.table, *self.slots)]
        operation: tf.Operation = _operation(f"CollectiveSparse{self.rule}")(
            *variables, *self.numbers, self.gradient, self.rows, *used
        )
        return operation


class _Sum(NamedTuple):
    """Says which table's gradient of which CollectiveReduceRows a tensor is."""

    op: tf.Operation
    table: int


class _Pending(NamedTuple):
    """Holds an update that waits; `done` stands for it, behind its control dependencies."""

    update: RowUpdate
    sum: _Sum
    done: tf.Operation


_current = threading.local()


@contextlib.contextmanager
def fusing() -> Iterator[None]:
    """Fuses updates that are made inside with the sums of their gradients."""
    previous, _current.pending = getattr(_current, "pending", None), []
    try:
        yield
        by_sum: dict[tf.Operation, list[_Pending]] = {}
        for pending in _current.pending:
            by_sum.setdefault(pending.sum.op, []).append(pending)
        for op, of_sum in by_sum.items():
            _build(op, of_sum)
    finally:
        _current.pending = previous


def apply(update: RowUpdate) -> tf.Operation:
    """Makes the operation of an update; inside of `fusing` one that stands for it."""
    pending = getattr(_current, "pending", None)
    found = _sum_of(update.gradient, update.rows) if pending is not None else None
    if pending is None or found is None:
        return update.alone()
    done = tf.no_op()
    pending.append(_Pending(update, found, done))
    return done


def before_sum(values: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns what a table's gradient is summed from, for those who need not wait for the sum.

    Args:
        values: [K, D].
        rows: [K].

    Returns:
        (the gradients of all tables as the ranks sent them, the table's rows with repetitions); for
        a gradient that is no such sum (values, rows) themselves.
    """
    found = _sum_of(values, rows)
    if found is None:
        return values, rows
    inputs = found.op.inputs
    return inputs[0], inputs[1 + attribute(found.op, "T") + found.table]


def _sum_of(values: tf.Tensor, rows: tf.Tensor) -> _Sum | None:
    """Returns the sum that a table's gradient is, unchanged; None if it isn't one."""
    op = rows.op
    if op.type != "CollectiveReduceRows" or op.graph is not tf.get_default_graph():
        return None
    table = rows.value_index - attribute(op, "T")
    # TensorFlow's optimizers let each gradient of an operation wait for the others.
    while values.op.type == "Identity" and _waits_only_for(values.op, op):
        values = values.op.inputs[0]
    return _Sum(op, table) if values.op is op and values.value_index == table else None


def _waits_only_for(identity: tf.Operation, op: tf.Operation) -> bool:
    return all(
        waited is op or (waited.type == "NoOp" and _waits_only_for(waited, op))
        for waited in identity.control_inputs
    )


def _build(op: tf.Operation, pending: Sequence[_Pending]) -> None:
    """Makes the operations of updates by one sum."""
    if _is_fusible(op, pending):
        # All in the scope of the first: a profile takes its operations for the optimizer's.
        waited = dict.fromkeys(x for each in pending for x in each.done.control_inputs)
        with _in_place_of(pending[0], waited):
            fused = _fused(op, pending)
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
    with (
        tf.name_scope(f"{scope}/" if scope else None),
        tf.get_default_graph().colocate_with(pending.update.table.handle.op, ignore_existing=True),
        tf.control_dependencies(list(waited)),
    ):
        yield


def _is_fusible(op: tf.Operation, pending: Sequence[_Pending]) -> bool:
    kinds = {(x.update.rule, *(number.name for number in x.update.numbers)) for x in pending}
    tables = {x.sum.table for x in pending}
    if len(kinds) > 1 or len(tables) < len(pending) or any(attribute(op, "max_norms")):
        return False
    if op._get_control_flow_context() is not None or _is_used(op):
        return False
    # An update may wait for another one. Nothing older than the first can do so.
    done = {x.done for x in pending}
    first = min(x._id for x in done)
    starts = [x for each in pending for x in each.done.control_inputs]
    starts += [
        x.op for each in pending for x in (*each.update.numbers, each.update.used) if x is not None
    ]
    return not done & graph_analysis.walk(starts, stop=lambda x: x._id < first)


def _is_used(op: tf.Operation) -> bool:
    """Tells whether anything is computed from an operation's outputs, or waits for it."""
    stack, seen = [op], {op}
    while stack:
        reached = stack.pop()
        users = {user for x in reached.outputs for user in x.consumers()}
        for user in users.union(reached._control_outputs) - seen:
            if user.type not in ("Identity", "NoOp"):
                return True
            seen.add(user)
            stack.append(user)
    return False


def _fused(op: tf.Operation, pending: Sequence[_Pending]) -> tf.Operation:
    updates, inputs, count = [x.update for x in pending], op.inputs, attribute(op, "T")
    fused: tf.Operation = _operation(f"CollectiveSparseReduce{updates[0].rule}")(
        [update.table.handle for update in updates],
        [slot.handle for update in updates for slot in update.slots],
        updates[0].numbers,
        [update.used for update in updates if update.used is not None],
        inputs[0],
        [inputs[1 + count + x.sum.table] for x in pending],
        *inputs[1 + 2 * count :],
        updated=[x.sum.table for x in pending],
        **{name: attribute(op, name) for name in (*_LAYOUT, "scale")},
    )
    return fused


def _operation(op_type: str) -> Any:
    return getattr(native_library.library(), re.sub("(?<!^)(?=[A-Z])", "_", op_type).lower())
