"""Tables that start from a checkpoint: `tf.train.init_from_checkpoint`, and what an Estimator's
warm start makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.ops import variable_scope, variables
from tensorflow.python.training import checkpoint_utils

from collective.checkpoint import table_io
from collective.checkpoint.compatibility import column_of, difference
from collective.checkpoint.layout import StoredTable
from collective.checkpoint.shards import Shard
from collective.checkpoint.tensor_bundle import Bundle
from collective.coordination import barrier
from collective.ops import collectives
from collective.tables import initializers, served_table
from collective.tables.table import Table, shard_of


def init_from_checkpoint(original: Any, ckpt_dir_or_file: Any, assignment_map: Any) -> None:
    """`checkpoint_utils._init_from_checkpoint`: tables and slots get initializers that read the
    rank's rows.
    """
    if served_table.served_graph(tf.get_default_graph()) is not None:
        # what is served has the values of the checkpoint that is exported
        return
    pairs = list(assignment_map.items() if isinstance(assignment_map, Mapping) else assignment_map)
    ours: list[tuple[str, Any]] = []
    rest: list[tuple[str, Any]] = []
    for name, target in pairs:
        for entry, variable, given in _spread(name, target):
            (rest if variable is None else ours).append(
                (entry, given if variable is None else variable)
            )
    # one rank may see a newer one
    if collectives.size() > 1 and tf.io.gfile.isdir(ckpt_dir_or_file):
        ckpt_dir_or_file = barrier.exchange(
            None,
            f"looking for a checkpoint in '{ckpt_dir_or_file}'",
            {"path": checkpoint_utils._get_checkpoint_filename(ckpt_dir_or_file)},
        )[0]["path"]
    if ours:
        path = checkpoint_utils._get_checkpoint_filename(ckpt_dir_or_file)
        if path is None:
            raise ValueError(f"There is no checkpoint in '{ckpt_dir_or_file}'.")
        bundle = Bundle(path)
        for name, variable in ours:
            _start(bundle, name, variable)
    if rest or not ours:
        original(ckpt_dir_or_file, rest)


def _spread(name: str, target: Any) -> list[tuple[str, Any, Any]]:
    """What a pair of an assignment map says: (name in the checkpoint, table or slot or None, what
    to say to TensorFlow).
    """
    stored = variable_scope._get_default_variable_store()._vars
    single = target[0] if isinstance(target, (list, tuple)) and len(target) == 1 else target
    if not isinstance(single, str):
        return [
            (
                name,
                single
                if isinstance(single, variables.Variable) and shard_of(single) is not None
                else None,
                target,
            )
        ]
    if single in stored:
        return [(name, stored[single] if shard_of(stored[single]) is not None else None, target)]
    scope = single.rpartition("/")[0] if "/" in single else ""
    inside = sorted(
        {n.partition("/part_")[0] for n in stored if not scope or n.startswith(scope + "/")}
    )
    if not name.endswith("/") or not any(shard_of(stored.get(n)) is not None for n in inside):
        return [(name, None, target)]
    start = "" if name == "/" else name
    found = [((start + n[len(scope) :].lstrip("/")).rstrip("/"), stored.get(n), n) for n in inside]
    return [(entry, v if shard_of(v) is not None else None, n) for entry, v, n in found]


def _start(bundle: Bundle, name: str, variable: Any) -> None:
    """Makes the initializer of a table or slot a read of column `name`.

    Raises:
        ValueError: there is no such column, or it doesn't fit.
    """
    table: Any = shard_of(variable)
    shard = Shard(
        variable.op.name, variable, table, None if isinstance(variable, Table) else table.op.name
    )
    column = column_of(bundle, name)
    if column is None:
        raise ValueError(
            f"Tensor {name} is not found in checkpoint '{bundle.prefix}', from which "
            f"'{shard.name}' is to start."
        )
    unfit = difference(shard, column)
    if unfit:
        raise ValueError(f"checkpoint '{bundle.prefix}': {unfit}.")
    if shard.dynamic:
        _start_dynamic(bundle, shard, column)
        return
    with variable.graph.as_default(), tf.init_scope(), tf.name_scope("collective/checkpoint"):
        value = initializers.filled(
            shard.shape,
            variable.dtype.base_dtype,
            lambda out: table_io.read_shard(bundle, column, out),
        )
        variable._initializer_op = tf.raw_ops.AssignVariableOp(
            resource=variable.handle, value=value
        )
        # its initial_value isn't to be had whole
        variable._initial_value, variable._whole_value = value, None
        initializers.only_after(variable._initializer_op, value)


def _start_dynamic(bundle: Bundle, shard: Shard, column: StoredTable) -> None:
    if shard.slot_of is not None:
        raise ValueError(
            f"'{shard.name}' is a slot of the dynamic table '{shard.slot_of}', and "
            f"can't start from a checkpoint "
            "without it: restore both with a Saver, or let it start fresh."
        )
    table: Any = shard.table
    table.first_rows = lambda loading: table_io.read_dynamic(
        bundle, [column], lambda keys, values: loading.add(keys, values[0], {})
    )


def infer_name(original: Any, var: Any) -> str:
    """`warm_starting_util._infer_var_name`, which converts a variable to a tensor to know its name."""
    if len(var) == 1 and isinstance(var[0], variables.Variable) and shard_of(var[0]) is not None:
        return str(var[0].op.name)
    name: str = original(var)
    return name
