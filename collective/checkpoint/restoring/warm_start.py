"""Starts tables from a checkpoint: `tf.train.init_from_checkpoint`, and Estimators' warm starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files import chain
from collective.checkpoint.files.layout import StoredTable
from collective.checkpoint.files.tensor_bundle import Bundle
from collective.checkpoint.reading.compatibility import difference, find_stored_table
from collective.checkpoint.rows import table_io
from collective.checkpoint.rows.shards import Shard
from collective.coordination import barrier
from collective.ops import placement
from collective.ops.communication import collectives
from collective.tables import served_table
from collective.tables.rows import initializers
from collective.tables.table import Table, is_replicated_table, shard_of, shard_view
from collective.tensorflow_internals.checkpoints import checkpoint_utils
from collective.tensorflow_internals.variables import variable_scope, variables


class Assignment(NamedTuple):
    """Says which variable starts from which entry.

    Attributes:
        entry: the name in the checkpoint.
        shard: a table or slot; None for anything else.
        target: its value in TensorFlow's assignment map.
    """

    entry: str
    shard: Any
    target: Any


def init_from_checkpoint(original: Any, ckpt_dir_or_file: Any, assignment_map: Any) -> None:
    """Replaces `checkpoint_utils._init_from_checkpoint`.

    Tables and slots get initializers that read the rank's rows.
    """
    if served_table.served_graph(tf.get_default_graph()) is not None:
        # A graph to be served takes its values from the exported checkpoint.
        return
    is_map = isinstance(assignment_map, Mapping)
    pairs = assignment_map.items() if is_map else assignment_map
    assignments = [a for name, target in pairs for a in _assignments(name, target)]
    for_tables = [a for a in assignments if a.shard is not None]
    for_tensorflow = [(a.entry, a.target) for a in assignments if a.shard is None]
    ckpt_dir_or_file = agreed_path(ckpt_dir_or_file)
    if for_tables:
        bundle = open_agreed(ckpt_dir_or_file)
        for assignment in for_tables:
            _start_from(bundle, assignment.entry, assignment.shard)
    if tf.executing_eagerly():
        # TensorFlow changes initializers, and these have been carried out.
        for entry, target in for_tensorflow:
            if is_replicated_table(target):
                _read_whole_into(open_agreed(ckpt_dir_or_file), entry, target)
    if for_tensorflow or not for_tables:
        original(ckpt_dir_or_file, for_tensorflow)


def agreed_path(ckpt_dir_or_file: Any) -> Any:
    """Returns the latest checkpoint of a folder, as rank 0 sees it; any other path unchanged.

    One rank may see a newer checkpoint than another.
    """
    if collectives.size() == 1 or not tf.io.gfile.isdir(ckpt_dir_or_file):
        return ckpt_dir_or_file
    return barrier.exchange(
        None,
        f"looking for a checkpoint in '{ckpt_dir_or_file}'",
        {"path": checkpoint_utils._get_checkpoint_filename(ckpt_dir_or_file)},
    )[0]["path"]


def open_agreed(path: Any) -> Bundle:
    """Opens the whole checkpoint that `agreed_path` has found.

    Raises:
        ValueError: there is no checkpoint.
    """
    prefix = None if path is None else checkpoint_utils._get_checkpoint_filename(path)
    if prefix is None:
        raise ValueError(f"There is no checkpoint in '{path}'.")
    return chain.open_whole(prefix)


def _assignments(name: str, target: Any) -> Iterator[Assignment]:
    """Yields the assignments of one pair of an assignment map; a pair of scopes gives one each."""
    stored = variable_scope._get_default_variable_store()._vars
    single = target[0] if isinstance(target, (list, tuple)) and len(target) == 1 else target
    if not isinstance(single, str):
        yield Assignment(name, shard_or_none(single), target)
        return
    if single in stored:
        yield Assignment(name, shard_or_none(stored[single]), target)
        return
    scope = single.rpartition("/")[0] if "/" in single else ""
    in_scope = sorted(
        {n.partition("/part_")[0] for n in stored if not scope or n.startswith(scope + "/")}
    )
    has_shards = any(shard_or_none(stored.get(n)) is not None for n in in_scope)
    if not name.endswith("/") or not has_shards:
        yield Assignment(name, None, target)
        return
    start = "" if name == "/" else name
    for n in in_scope:
        entry = (start + n[len(scope) :].lstrip("/")).rstrip("/")
        yield Assignment(entry, shard_or_none(stored.get(n)), n)


def shard_or_none(variable: Any) -> Any:
    is_shard = isinstance(variable, variables.Variable) and shard_of(variable) is not None
    return variable if is_shard else None


def _start_from(bundle: Bundle, name: str, variable: Any) -> None:
    """Lets the initializer of a table or slot read the stored table `name`.

    Raises:
        ValueError: there is no such stored table, or it doesn't fit.
    """
    shard = shard_named_by_variable(variable)
    stored = stored_for(bundle, name, shard)
    unfit = difference(shard, stored)
    if unfit:
        raise ValueError(f"checkpoint '{bundle.prefix}': {unfit}.")
    if tf.executing_eagerly():
        _read_into(bundle, shard, stored)
        return
    if shard.dynamic:
        _start_dynamic_from(bundle, shard, stored)
        return
    with variable.graph.as_default(), tf.init_scope(), tf.name_scope("collective/checkpoint"):
        value = initializers.filled(
            shard.shape,
            variable.dtype.base_dtype,
            lambda out: table_io.read_shard(bundle, stored, shard.table.row_placement, out),
        )
        initialize_by(variable, value)


def _read_into(bundle: Bundle, shard: Shard, stored: StoredTable) -> None:
    """Reads the rows of a new table of eager code."""
    if shard.dynamic:
        store: Any = shard.table.store(None)

        def receive(keys: np.ndarray, values: list[np.ndarray]) -> None:
            store.put(keys, values[0])
            store.limit_memory([])

        table_io.read_dynamic(bundle, [stored], shard.table.placement, receive)
        return
    rows = np.empty(shard.shape, shard.dtype)
    table_io.read_shard(bundle, stored, shard.table.row_placement, rows)
    with shard_view():
        shard.variable.assign(rows)


def _read_whole_into(bundle: Bundle, name: str, variable: Any) -> None:
    """Reads the rows of a new table of eager code that every rank has whole.

    Raises:
        ValueError: the checkpoint doesn't have it, or with another shape.
    """
    stored = find_stored_table(bundle, name)
    if stored is None:
        variable.assign(bundle.read_whole(name))
        return
    rows = np.empty(variable.shape.as_list(), variable.dtype.as_numpy_dtype)
    if stored.rows != len(rows) or stored.dim != rows.shape[1]:
        raise ValueError(
            f"checkpoint '{bundle.prefix}': '{name}' is [{stored.rows}, {stored.dim}] there, and "
            f"{list(rows.shape)} here."
        )
    variable.assign(table_io.read_shard(bundle, stored, placement.static(1), rows))


def shard_named_by_variable(variable: Any) -> Shard:
    """Describes a table, or a slot of one, under the names of the variables in the graph."""
    table: Any = shard_of(variable)
    slot_of = None if isinstance(variable, Table) else table.op.name
    return Shard(variable.op.name, variable, table, slot_of)


def stored_for(bundle: Bundle, name: str, shard: Shard) -> StoredTable:
    """Returns the stored table `name`, from which `shard` is to start.

    Raises:
        ValueError: there is no such table.
    """
    stored = find_stored_table(bundle, name)
    if stored is None:
        raise ValueError(
            f"Tensor {name} is not found in checkpoint '{bundle.prefix}', from which "
            f"'{shard.name}' is to start."
        )
    return stored


def initialize_by(variable: Any, value: tf.Tensor) -> None:
    """Makes a static shard's initializer assign `value`, as `initializers.filled` returns it."""
    variable._initializer_op = tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
    # The variable's initial_value can't be computed as a whole.
    variable._initial_value, variable._whole_value = value, None
    initializers.only_after(variable._initializer_op, value)


def _start_dynamic_from(bundle: Bundle, shard: Shard, stored: StoredTable) -> None:
    if shard.slot_of is not None:
        raise ValueError(
            f"'{shard.name}' is a slot of the dynamic table '{shard.slot_of}', and can't start "
            "from a checkpoint without it: restore both with a Saver, or let it start fresh."
        )
    table: Any = shard.table
    table.first_rows = lambda loading: table_io.read_dynamic(
        bundle, [stored], table.placement, lambda keys, values: loading.add(keys, values[0], {})
    )


def infer_name(original: Any, var: Any) -> str:
    """Replaces `warm_starting_util._infer_var_name`.

    TensorFlow's function converts a variable to a tensor to get its name.
    """
    if len(var) == 1 and shard_or_none(var[0]) is not None:
        return str(var[0].op.name)
    name: str = original(var)
    return name
