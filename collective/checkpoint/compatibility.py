"""What of a checkpoint fits the tables and variables of a graph; what doesn't is said before
anything is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import tensor_util
from tensorflow.python.trackable import base as trackable

from collective.checkpoint.layout import STATIC, StoredTable
from collective.checkpoint.tensor_bundle import Bundle, slice_rows

if TYPE_CHECKING:
    from collective.checkpoint.shards import Shard

SHOWN = 5  # problems in one error
# an optimizer's own variables, which are nobody's slots
SCALARS = ("beta1_power", "beta2_power")


def column_of(bundle: Bundle, name: str) -> StoredTable | None:
    """The column `name` of a checkpoint, or of the part `name` of it: sharded, or a whole matrix of
    plain TensorFlow's.
    """
    columns = bundle.layout.columns
    whole, _, part = name.rpartition("/part_")
    if name not in columns and part.isdigit() and whole in columns:
        name = whole
    if name in columns:
        return columns[name]
    dtype, shape = bundle.entries.get(name, (None, ()))
    if len(shape) != 2:
        return None
    return StoredTable(
        name,
        STATIC,
        shape[0],
        shape[1],
        tf.as_dtype(dtype).name,
        slice_rows(shape[1], dtype),
        (shape[0],),
    )


@dataclasses.dataclass
class RestorePlan:
    """What a restore will do.

    Attributes:
        pairs: shards, and the columns from which they are restored.
        fresh: slots that the checkpoint lacks and that start anew.
        missing: names of the other variables that the checkpoint lacks and that start anew.
    """

    pairs: list[tuple[Shard, StoredTable]]
    fresh: list[Shard]
    missing: list[str]


class Problems:
    """Collects what doesn't fit; `check` raises all of it as one error."""

    def __init__(self, bundle: Bundle):
        self._prefix = bundle.prefix
        self._texts: list[str] = []
        self._only_missing = True

    def missing(self, text: str) -> None:
        self._texts.append(text)

    def unfit(self, text: str) -> None:
        self._texts.append(text)
        self._only_missing = False

    def check(self) -> None:
        if not self._texts:
            return
        more = f" (and {len(self._texts) - SHOWN} more)" if len(self._texts) > SHOWN else ""
        message = (
            f"checkpoint '{self._prefix}' does not fit this graph; nothing was loaded: "
            + "; ".join(self._texts[:SHOWN])
            + more
        )
        raise (tf.errors.NotFoundError if self._only_missing else tf.errors.InvalidArgumentError)(
            None, None, message
        )


def plan(
    bundle: Bundle, shards: Sequence[Shard], saved: dict[str, Any], fresh_slots: bool, reshape: bool
) -> RestorePlan:
    """How `shards`, and the other variables `saved` (see `saved_by`), come from `bundle`.

    Raises:
        tf.errors.NotFoundError: it lacks some of them.
        tf.errors.InvalidArgumentError: some are of another shape, dtype or kind.
        tf.errors.DataLossError: a data file is missing or cut off.
    """
    out, problems = RestorePlan([], [], []), Problems(bundle)
    for shard in shards:
        column = column_of(bundle, shard.name)
        if column is None and shard.slot_of is not None and fresh_slots:
            out.fresh.append(shard)
        elif column is None:
            problems.missing(_lacks(bundle, shard))
        else:
            unfit = difference(shard, column)
            if unfit:
                problems.unfit(unfit)
            for entry in _entries(bundle, column):
                if entry not in bundle.entries:
                    problems.missing(
                        f"its entry '{entry}', a part of '{column.name}', is missing: copy it again"
                    )
            out.pairs.append((shard, column))
    _check_others(bundle, saved, fresh_slots, reshape, out, problems)
    problems.check()
    bundle.check_files()
    return out


def _entries(bundle: Bundle, column: StoredTable) -> Iterable[str]:
    for part in range(len(column.parts)):
        yield bundle.layout.entry(column, part)
        if column.keys:
            yield bundle.layout.keys_entry(column, part)


def _lacks(bundle: Bundle, shard: Shard) -> str:
    if shard.slot_of is None:
        there = sorted(c.name for c in bundle.layout.columns.values() if c.slot_of is None)
        if (
            f"{shard.name}/.ATTRIBUTES" in bundle.entries
            or trackable.OBJECT_GRAPH_PROTO_KEY in bundle.entries
        ):
            return f"it has no table '{shard.name}': tf.train.Checkpoint wrote it, by objects; tf.train.Saver's are by names"
        return f"it has no table '{shard.name}' (its tables: {', '.join(there[:SHOWN]) or 'none'})"
    there = sorted(c.name for c in bundle.layout.slots_of(shard.slot_of)) or sorted(
        name for name in bundle.entries if name.startswith(shard.slot_of + "/")
    )
    kinds = sorted({name[len(shard.slot_of) + 1 :] for name in there})
    written = (
        f"it was written with {', '.join(kinds)} ({', '.join(there)})"
        if kinds
        else "it was written without slots"
    )
    return (
        f"it has no '{shard.name}', a slot of table '{shard.slot_of}'; {written}. Use the "
        f"optimizer that it was written "
        "with, or strategy.scope(missing_slots='fresh')"
    )


def difference(shard: Shard, column: StoredTable) -> str | None:
    """What keeps `column` from being restored into `shard`, if anything."""
    name = (
        f"'{shard.name}'"
        if shard.name == column.name
        else f"'{shard.name}' (there '{column.name}')"
    )
    ours, theirs = shard.column([], 1), column
    if ours.kind != theirs.kind:
        return f"{name} is {ours.kind} here, {theirs.kind} in the checkpoint"
    if (ours.rows, ours.dim) != (theirs.rows, theirs.dim):

        def shape(c: StoredTable) -> str:
            return f"[{'any' if c.rows is None else c.rows}, {c.dim}]"

        return f"{name} has the shape {shape(ours)} here, {shape(theirs)} in the checkpoint"
    if ours.dtype != theirs.dtype:
        return f"{name} is {ours.dtype} here, {theirs.dtype} in the checkpoint"
    return None


def saved_by(graph: tf.Graph, saver_def: Any) -> dict[str, Any]:
    """The tensors that a Saver's own operations save, by their names in a checkpoint; None for
    slices of one.
    """
    found: dict[str, Any] = {}
    stack, seen = [graph.get_tensor_by_name(saver_def.save_tensor_name).op], set()
    while stack:
        op = stack.pop()
        if op in seen:
            continue
        seen.add(op)
        if op.type == "SaveV2":
            names, slices = (tensor_util.constant_value(op.inputs[i]) for i in (1, 2))
            for name, piece, tensor in zip(names, slices, op.inputs[3:]):
                found[name.decode()] = None if piece else tensor
        else:
            stack += [x.op for x in op.inputs] + list(op.control_inputs)
    return found


def _check_others(
    bundle: Bundle,
    saved: dict[str, Any],
    fresh_slots: bool,
    reshape: bool,
    out: RestorePlan,
    problems: Problems,
) -> None:
    if trackable.OBJECT_GRAPH_PROTO_KEY in bundle.entries:
        return  # TensorFlow finds its own way with these
    for name, tensor in saved.items():
        if name not in bundle.entries:
            if fresh_slots and _is_optimizers(name, saved):
                out.missing.append(name)
            elif name in bundle.layout.columns:
                problems.unfit(
                    f"'{name}' is a table in the checkpoint, an ordinary variable "
                    f"here: make it in "
                    "embedding_scope(), or restore from what `python -m "
                    "collective.checkpoint consolidate` makes"
                )
            else:
                problems.missing(
                    f"it has no variable '{name}'"
                    + (
                        " (an optimizer's: use the one that it was written with, or "
                        "strategy.scope(missing_slots='fresh'))"
                        if _is_optimizers(name, saved)
                        else ""
                    )
                )
            continue
        dtype, shape = bundle.entries[name]
        if tensor is None:
            continue
        if tensor.dtype.base_dtype != tf.as_dtype(dtype):
            problems.unfit(
                f"'{name}' is {tensor.dtype.base_dtype.name} here, "
                f"{tf.as_dtype(dtype).name} in the checkpoint"
            )
        elif not tensor.shape.is_compatible_with(shape) and not (
            reshape and tensor.shape.num_elements() == int(np.prod(shape))
        ):
            problems.unfit(
                f"'{name}' has the shape {tensor.shape.as_list()} here, {list(shape)} "
                f"in the checkpoint"
            )


def _is_optimizers(name: str, names: Iterable[str]) -> bool:
    """Whether a variable is an optimizer's, as far as its name says: `<variable>/<Slot>`, or a
    scalar of Adam's.
    """
    owner, _, last = name.rpartition("/")
    return owner in names or last.rpartition("_")[0] in SCALARS or last in SCALARS
