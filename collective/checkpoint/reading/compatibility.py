"""Checks that a checkpoint fits the tables and variables of a graph, before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files.layout import STATIC, StoredTable
from collective.checkpoint.files.tensor_bundle import Bundle, stored_matrix
from collective.ops.graph import graph_analysis
from collective.tensorflow_internals.graphs import tensor_util
from collective.tensorflow_internals.variables import base as trackable

if TYPE_CHECKING:
    from collective.checkpoint.rows.shards import Shard

SHOWN = 5  # problems in one error
# An optimizer's variables that aren't slots of a variable.
SCALARS = ("beta1_power", "beta2_power")


def find_stored_table(bundle: Bundle, name: str) -> StoredTable | None:
    """Returns the stored table `name` of a checkpoint; `name` may also be that of a part.

    A matrix in a plain TensorFlow checkpoint is a static table in one part.
    """
    tables = bundle.layout.tables
    table_name, _, part = name.rpartition("/part_")
    if name not in tables and part.isdigit() and table_name in tables:
        name = table_name
    if name in tables:
        return tables[name]
    dtype, shape = bundle.entries.get(name, (None, ()))
    if len(shape) != 2:
        return None
    return stored_matrix(name, shape, dtype)


@dataclasses.dataclass
class RestorePlan:
    """Says what a restore will do.

    Attributes:
        pairs: shards, and the stored tables from which they are restored.
        fresh: slots that the checkpoint lacks and that start fresh.
        missing: names of the other variables that the checkpoint lacks and that start fresh.
        whole: ordinary variables that are static tables or slots in the checkpoint, by name: they
            take all of the stored rows.
    """

    pairs: list[tuple[Shard, StoredTable]]
    fresh: list[Shard]
    missing: list[str]
    whole: dict[str, StoredTable]


class Problems:
    """Collects what doesn't fit; `check` raises all of it as one error."""

    def __init__(self, bundle: Bundle):
        self._prefix = bundle.prefix
        self._texts: list[str] = []
        self._only_missing = True
        self._advice = ""

    def add_missing(self, text: str) -> None:
        self._texts.append(text)

    def add_unfit(self, text: str) -> None:
        self._texts.append(text)
        self._only_missing = False

    def advise(self, text: str) -> None:
        """Adds what to do, if only missing variables prevent the restore."""
        self._advice = text

    def check(self) -> None:
        if not self._texts:
            return
        hidden = len(self._texts) - SHOWN
        kind = tf.errors.NotFoundError if self._only_missing else tf.errors.InvalidArgumentError
        raise kind(
            None,
            None,
            f"checkpoint '{self._prefix}' does not fit this graph; nothing was loaded: "
            + "; ".join(self._texts[:SHOWN])
            + (f" (and {hidden} more)" if hidden > 0 else "")
            + (f". {self._advice}" if self._advice and self._only_missing else ""),
        )


def plan(
    bundle: Bundle,
    shards: Sequence[Shard],
    saved_tensors: dict[str, Any],
    fresh_slots: bool,
    reshape: bool,
) -> RestorePlan:
    """Plans the restore of a Saver.

    Args:
        bundle: the checkpoint.
        shards: the Saver's tables and slots.
        saved_tensors: its other variables (see `tensors_saved_by`).
        fresh_slots: whether slots and optimizers' variables that the checkpoint lacks start fresh.
        reshape: whether variables may have another shape there, with the same number of elements.

    Raises:
        tf.errors.NotFoundError: the checkpoint lacks some of them.
        tf.errors.InvalidArgumentError: some have another shape, dtype or kind.
        tf.errors.DataLossError: a data file is missing or cut off.
    """
    restore_plan, problems = RestorePlan([], [], [], {}), Problems(bundle)
    new_tables = [
        shard.name
        for shard in shards
        if shard.slot_of is None
        and not shard.may_be_missing
        and find_stored_table(bundle, shard.name) is None
    ]
    if new_tables:
        problems.add_missing(_missing_tables(bundle, new_tables))
    for shard in shards:
        stored = find_stored_table(bundle, shard.name)
        if stored is None and (shard.slot_of or shard.name) in new_tables:
            continue  # The slots of a new table are new, too.
        if stored is None and (shard.slot_of is not None and fresh_slots or shard.may_be_missing):
            restore_plan.fresh.append(shard)
        elif stored is None:
            assert shard.slot_of is not None
            problems.add_missing(_missing_slot(bundle, shard.name, shard.slot_of))
        else:
            unfit = difference(shard, stored)
            if unfit:
                problems.add_unfit(unfit)
            for entry in bundle.layout.entries_of(stored):
                if entry not in bundle.entries:
                    problems.add_missing(
                        f"its entry '{entry}', a part of '{stored.name}', is missing: copy it again"
                    )
            restore_plan.pairs.append((shard, stored))
    # TensorFlow matches the objects of an object-based checkpoint by itself.
    new_variables: list[str] = []
    if trackable.OBJECT_GRAPH_PROTO_KEY not in bundle.entries:
        for name, tensor in saved_tensors.items():
            stored = bundle.layout.tables.get(name)
            if stored is not None:
                unfit = _difference_of_variable(name, tensor, stored, reshape)
                if unfit:
                    problems.add_unfit(unfit)
                restore_plan.whole[name] = stored
            elif name not in bundle.entries and fresh_slots and is_optimizers(name, saved_tensors):
                restore_plan.missing.append(name)
            elif name not in bundle.entries:
                new_variables.append(name)
            elif tensor is not None:
                _check_variable(bundle, name, tensor, reshape, problems)
    _add_missing_variables(new_variables, saved_tensors, problems)
    has_some = restore_plan.pairs or len(new_variables) < len(saved_tensors)
    if has_some and (new_tables or not all(is_optimizers(n, saved_tensors) for n in new_variables)):
        problems.advise(_way_to_start(bundle))
    problems.check()
    bundle.check_files()
    return restore_plan


def _missing_tables(bundle: Bundle, names: Sequence[str]) -> str:
    lacks = f"it has no {_named('table', names)}"
    is_object_based = trackable.OBJECT_GRAPH_PROTO_KEY in bundle.entries
    if is_object_based or any(f"{name}/.ATTRIBUTES" in bundle.entries for name in names):
        return f"{lacks}: tf.train.Checkpoint wrote it, by objects; tf.train.Saver's are by names"
    tables = sorted(c.name for c in bundle.layout.tables.values() if c.slot_of is None)
    hidden = len(tables) - SHOWN
    more = f" and {hidden} more" if hidden > 0 else ""
    return f"{lacks} (its tables: {', '.join(tables[:SHOWN]) or 'none'}{more})"


def _named(kind: str, names: Sequence[str]) -> str:
    """Lists names: "table 'a'", "tables 'a', 'b'"."""
    hidden = len(names) - SHOWN
    listed = ", ".join(f"'{name}'" for name in names[:SHOWN])
    return f"{kind}{'s' if len(names) > 1 else ''} {listed}" + (
        f" and {hidden} more" if hidden > 0 else ""
    )


def _way_to_start(bundle: Bundle) -> str:
    """Says how a model with more variables than a checkpoint can start from it."""
    return (
        "To start a model with new tables or variables from this checkpoint, give the model a "
        "folder of its own (checkpoint_dir, model_dir), and open strategy.scope(warm_start="
        f"collective.checkpoint.WarmStart('{bundle.prefix}', slots=True)): a "
        "MonitoredTrainingSession or an Estimator then takes what the checkpoint has, and what it "
        "lacks starts fresh"
    )


def _missing_slot(bundle: Bundle, name: str, slot_of: str) -> str:
    slots = sorted(stored.name for stored in bundle.layout.slots_of(slot_of))
    slots = slots or sorted(entry for entry in bundle.entries if entry.startswith(slot_of + "/"))
    kinds = sorted({slot.rpartition(f"{slot_of}/")[2] for slot in slots})
    written = "without slots"
    if kinds:
        written = f"with {', '.join(kinds)} ({', '.join(slots)})"
    return (
        f"it has no '{name}', a slot of table '{slot_of}'; it was written {written}. Use the "
        "optimizer that it was written with, or strategy.scope(missing_slots='fresh')"
    )


def difference(shard: Shard, stored: StoredTable) -> str | None:
    """Says why `stored` can't be restored into `shard`; None if it can."""
    name = f"'{shard.name}'"
    if shard.name != stored.name:
        name += f" (there '{stored.name}')"
    here = shard.stored([], 1)
    if here.kind != stored.kind:
        return f"{name} is {here.kind} here, {stored.kind} in the checkpoint"
    if (here.rows, here.dim) != (stored.rows, stored.dim):
        return (
            f"{name} has the shape {_shape_text(here)} here, {_shape_text(stored)} in the "
            "checkpoint"
        )
    if here.dtype != stored.dtype:
        return f"{name} is {here.dtype} here, {stored.dtype} in the checkpoint"
    return None


def _shape_text(stored: StoredTable) -> str:
    return f"[{'any' if stored.rows is None else stored.rows}, {stored.dim}]"


def tensors_saved_by(graph: tf.Graph, saver_def: Any) -> dict[str, Any]:
    """Returns the tensors that a Saver's own operations save, by their names in a checkpoint.

    A name of which only slices are saved maps to None.
    """

    def is_save(op: tf.Operation) -> bool:
        return bool(op.type == "SaveV2")

    top = graph.get_tensor_by_name(saver_def.save_tensor_name).op
    saves = filter(is_save, graph_analysis.walk([top], stop=is_save))
    tensors: dict[str, Any] = {}
    for op in sorted(saves, key=lambda op: str(op.name)):
        names, slices = (tensor_util.constant_value(op.inputs[i]) for i in (1, 2))
        for name, piece, tensor in zip(names, slices, op.inputs[3:]):
            tensors[name.decode()] = None if piece else tensor
    return tensors


def _add_missing_variables(
    names: Sequence[str], all_names: Iterable[str], problems: Problems
) -> None:
    """Notes variables that the checkpoint lacks, but not their slots."""
    own = [name for name in names if not is_optimizers(name, all_names)]
    if own:
        problems.add_missing(f"it has no {_named('variable', own)}")
    for name in names:
        if name not in own and name.rpartition("/")[0] not in own:
            problems.add_missing(
                f"it has no variable '{name}' (an optimizer's: use the one that it was written "
                "with, or strategy.scope(missing_slots='fresh'))"
            )


def _check_variable(
    bundle: Bundle, name: str, tensor: Any, reshape: bool, problems: Problems
) -> None:
    dtype, shape = bundle.entries[name]
    if tensor.dtype.base_dtype != tf.as_dtype(dtype):
        problems.add_unfit(
            f"'{name}' is {tensor.dtype.base_dtype.name} here, {tf.as_dtype(dtype).name} in the "
            "checkpoint"
        )
        return
    fits = tensor.shape.is_compatible_with(shape)
    if reshape and not fits:
        fits = tensor.shape.num_elements() == int(np.prod(shape))
    if not fits:
        problems.add_unfit(
            f"'{name}' has the shape {tensor.shape.as_list()} here, {list(shape)} in the checkpoint"
        )


def _difference_of_variable(
    name: str, tensor: Any, stored: StoredTable, reshape: bool
) -> str | None:
    """Says why an ordinary variable can't take the rows of `stored`; None if it can.

    Args:
        name: the Saver's name for the variable.
        tensor: its value; None if only slices of it are saved.
        stored: a table or slot in the checkpoint.
        reshape: whether it may have another shape there, with the same number of elements.
    """
    if stored.kind != STATIC:
        return (
            f"'{name}' is a dynamic table in the checkpoint, an ordinary variable here: give it "
            "the shape [None, D] in tf.get_variable, or make it by "
            "collective.get_embedding_variable"
        )
    if tensor is None:
        return (
            f"'{name}' is a table in the checkpoint, a partitioned variable here: make it without "
            "a partitioner, or in embedding_scope()"
        )
    if tensor.dtype.base_dtype.name != stored.dtype:
        return f"'{name}' is {tensor.dtype.base_dtype.name} here, {stored.dtype} in the checkpoint"
    shape = [stored.count, stored.dim]
    fits = tensor.shape.is_compatible_with(shape)
    if reshape and not fits:
        fits = tensor.shape.num_elements() == int(np.prod(shape))
    if fits:
        return None
    return f"'{name}' has the shape {tensor.shape.as_list()} here, {shape} in the checkpoint"


def is_optimizers(name: str, names: Iterable[str]) -> bool:
    """Tells by its name if a variable is an optimizer's: `<variable>/<Slot>`, or in SCALARS."""
    variable, _, last = name.rpartition("/")
    return variable in names or last.rpartition("_")[0] in SCALARS or last in SCALARS
