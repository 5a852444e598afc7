"""Gives whole tables to TensorFlow's functions that read an entry of a checkpoint by its name.

A table on N > 1 ranks is stored in parts, `table/part_0` and so on, and TensorFlow would find no
entry of its name. Inside scope(), TensorFlow's readers and operations find it whole, as plain
TensorFlow would have saved it. They read only the file of that name, without later increments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files.layout import (
    FORMAT_ENTRY,
    LAYOUT_ENTRY,
    STATIC,
    CheckpointLayout,
    StoredTable,
)
from collective.checkpoint.files.tensor_bundle import Bundle, index_path
from collective.checkpoint.reading import table_reader
from collective.ops.counting import counted
from collective.tensorflow_internals.graphs import tensor_util

# ---- TensorFlow's readers: tf.train.load_checkpoint, load_variable, list_variables


def has_tensor(original: Any, reader: Any, tensor_str: Any) -> bool:
    """Replaces `CheckpointReader.has_tensor`."""
    if original(reader, tensor_str):
        return True
    stored = _layout(reader).tables.get(tf.compat.as_text(tensor_str))
    return stored is not None and _is_in_parts(stored)


def get_tensor(original: Any, reader: Any, tensor_str: Any) -> Any:
    """Replaces `CheckpointReader.get_tensor`.

    Raises:
        tf.errors.NotFoundError: there is no such tensor, or it is a dynamic table.
    """
    name = tf.compat.as_text(tensor_str)
    try:
        return original(reader, name)
    except tf.errors.NotFoundError:
        # `_layout` asks here for the record itself, which TensorFlow's checkpoints don't have.
        layout = CheckpointLayout() if name == LAYOUT_ENTRY else _layout(reader)
        stored = layout.tables.get(name)
        if stored is None:
            raise
    if not _is_in_parts(stored):
        raise tf.errors.NotFoundError(None, None, _not_one_tensor(stored, layout)) from None
    whole = np.empty((stored.count, stored.dim), tf.as_dtype(stored.dtype).as_numpy_dtype)
    for part in range(len(stored.parts)):
        whole[stored.row_placement.rows_of(part)] = original(reader, layout.entry(stored, part))
    return whole


def get_variable_to_shape_map(original: Any, reader: Any) -> dict[str, list[int]]:
    """Replaces `CheckpointReader.get_variable_to_shape_map`."""
    shapes: dict[str, list[int]] = original(reader)
    layout = _layout(reader) if LAYOUT_ENTRY in shapes else CheckpointLayout()
    return _whole(shapes, layout, lambda stored: [stored.count, stored.dim])


def get_variable_to_dtype_map(original: Any, reader: Any) -> dict[str, tf.DType]:
    """Replaces `CheckpointReader.get_variable_to_dtype_map`."""
    dtypes: dict[str, tf.DType] = original(reader)
    layout = _layout(reader) if LAYOUT_ENTRY in dtypes else CheckpointLayout()
    return _whole(dtypes, layout, lambda stored: tf.as_dtype(stored.dtype))


def _layout(reader: Any) -> CheckpointLayout:
    """Returns the layout of a reader's checkpoint; an empty one if plain TensorFlow wrote it."""
    try:
        record = reader.get_tensor(LAYOUT_ENTRY)
    except tf.errors.NotFoundError:
        return CheckpointLayout()
    return CheckpointLayout.from_json(tf.compat.as_text(record))


def _whole(entries: dict[str, Any], layout: CheckpointLayout, describe: Any) -> dict[str, Any]:
    """Returns the entries with whole tables instead of their parts, and without the layout."""
    entries = {n: x for n, x in entries.items() if n not in (LAYOUT_ENTRY, FORMAT_ENTRY)}
    for stored in layout.tables.values():
        if _is_in_parts(stored):
            for part in range(len(stored.parts)):
                entries.pop(layout.entry(stored, part), None)
            entries[stored.name] = describe(stored)
    return entries


def _is_in_parts(stored: StoredTable) -> bool:
    """Tells whether a stored table is one tensor without an entry of its own."""
    return stored.kind == STATIC and stored.keys is None and len(stored.parts) > 1


def _not_one_tensor(stored: StoredTable, layout: CheckpointLayout) -> str:
    if layout.increment is not None:
        return (
            f"'{stored.name}' is in an increment, which has only what changed. Make a whole "
            "checkpoint of it: collective checkpoint consolidate."
        )
    what = (
        f"a slot of the dynamic table '{stored.slot_of}'" if stored.slot_of else "a dynamic table"
    )
    return (
        f"'{stored.name}' is {what}: its rows belong to keys, and no tensor has them all. Read "
        "keys and rows by collective.checkpoint.read_table or collective.checkpoint.load."
    )


# ---- TensorFlow's operations


def restore(
    original: Any,
    prefix: Any,
    tensor_names: Any,
    shape_and_slices: Any,
    dtypes: Any,
    name: Any = None,
) -> Any:
    """Replaces `io_ops.restore_v2` if path and names are known when the operation is made.

    Raises:
        ValueError: a tensor is a dynamic table, or has another shape or type there.
    """
    path, names, slices = (_constant(x) for x in (prefix, tensor_names, shape_and_slices))
    found: dict[int, StoredTable] = {}
    bundle = None
    if path is not None and names is not None and slices is not None:
        bundle, found = _find(path, names)
    if bundle is None or not found:
        return original(
            prefix=prefix,
            tensor_names=tensor_names,
            shape_and_slices=shape_and_slices,
            dtypes=dtypes,
            name=name,
        )
    others = [i for i in range(len(names)) if i not in found]
    results: dict[int, Any] = {}
    if others:
        restored = original(
            prefix=prefix,
            tensor_names=[names[i] for i in others],
            shape_and_slices=[slices[i] for i in others],
            dtypes=[dtypes[i] for i in others],
            name=name,
        )
        results = dict(zip(others, restored))
    for i, stored in found.items():
        results[i] = _read(bundle, stored, slices[i], tf.as_dtype(dtypes[i]))
    return [results[i] for i in range(len(names))]


def remap_matrix(
    original: Any,
    ckpt_path: Any,
    old_tensor_name: Any,
    row_remapping: Any,
    col_remapping: Any,
    initializing_values: Any,
    num_rows: int,
    num_cols: int,
    max_rows_in_memory: int = -1,
    name: Any = None,
) -> Any:
    """Replaces `load_and_remap_matrix` if path and name are known when the operation is made.

    Raises:
        ValueError: the tensor is a dynamic table, or has another type than float32.
    """
    path, tensor_name = _constant(ckpt_path), _constant(old_tensor_name)
    bundle: Bundle | None = None
    found: dict[int, StoredTable] = {}
    if path is not None and tensor_name is not None:
        bundle, found = _find(path, [tensor_name])
    if bundle is None or not found:
        return original(
            ckpt_path=ckpt_path,
            old_tensor_name=old_tensor_name,
            row_remapping=row_remapping,
            col_remapping=col_remapping,
            initializing_values=initializing_values,
            num_rows=num_rows,
            num_cols=num_cols,
            max_rows_in_memory=max_rows_in_memory,
            name=name,
        )
    opened, stored = bundle, found[0]
    _check_dtype(opened, stored, tf.float32)

    def remapped(rows: np.ndarray, columns: np.ndarray, fresh: np.ndarray) -> np.ndarray:
        return _remapped(opened, stored, (num_rows, num_cols), rows, columns, fresh)

    inputs = [
        tf.convert_to_tensor(row_remapping, tf.int64),
        tf.convert_to_tensor(col_remapping, tf.int64),
        tf.convert_to_tensor(initializing_values, tf.float32),
    ]
    value = tf.numpy_function(remapped, inputs, tf.float32, stateful=True, name=name)
    return tf.ensure_shape(value, [num_rows, num_cols])


def _constant(value: Any) -> Any:
    """Returns a text, or a list of texts, that is already known; None if it isn't."""
    if tensor_util.is_tf_type(value):
        value = tensor_util.constant_value(value)
        if value is None:
            return None
    value = np.asarray(value).tolist()
    if isinstance(value, (list, tuple)):
        if any(tensor_util.is_tf_type(x) for x in value):
            return None
        return [tf.compat.as_text(x) for x in value]
    return tf.compat.as_text(value)


def _find(path: str, names: list[str]) -> tuple[Bundle | None, dict[int, StoredTable]]:
    """Finds which of `names` are tables in parts, {place: stored table}.

    Raises:
        ValueError: one is a dynamic table.
    """
    if not tf.io.gfile.exists(index_path(path)):
        return None, {}
    reader = tf.train.NewCheckpointReader(path)
    missing = [i for i, name in enumerate(names) if name not in (LAYOUT_ENTRY, FORMAT_ENTRY)]
    tables = _layout(reader).tables
    candidates = {i: tables[names[i]] for i in missing if names[i] in tables}
    if not candidates:
        return None, {}
    bundle = Bundle(path)
    candidates = {i: stored for i, stored in candidates.items() if names[i] not in bundle.entries}
    for stored in candidates.values():
        if not _is_in_parts(stored):
            raise ValueError(f"checkpoint '{path}': {_not_one_tensor(stored, bundle.layout)}")
    return bundle, candidates


def _read(bundle: Bundle, stored: StoredTable, spec: str, dtype: tf.DType) -> tf.Tensor:
    """Returns a table, or the slice of it that `spec` names in the form of `RestoreV2`."""
    _check_dtype(bundle, stored, dtype)
    shape, ranges = [stored.count, stored.dim], [(0, stored.count), (0, stored.dim)]
    if spec:
        *extents, pieces = spec.split(" ")
        if list(map(int, extents)) != shape:
            raise ValueError(
                f"checkpoint '{bundle.prefix}': '{stored.name}' has the shape {shape}, but a slice "
                f"of a tensor of shape [{', '.join(extents)}] was requested."
            )
        for axis, piece in enumerate(pieces.split(":")):
            if piece != "-":
                begin, _, length = piece.partition(",")
                ranges[axis] = int(begin), int(length)
    (first, count), (first_column, columns) = ranges

    def read() -> np.ndarray:
        values = np.empty((count, columns), dtype.as_numpy_dtype)

        def receive(places: np.ndarray, rows: np.ndarray) -> None:
            values[places] = rows[:, first_column : first_column + columns]

        table_reader.read_rows(bundle, stored, first + np.arange(count), receive)
        return values

    return tf.ensure_shape(tf.numpy_function(read, [], dtype, stateful=True), [count, columns])


def _check_dtype(bundle: Bundle, stored: StoredTable, dtype: tf.DType) -> None:
    if dtype.base_dtype.name != stored.dtype:
        raise ValueError(
            f"checkpoint '{bundle.prefix}': '{stored.name}' is {stored.dtype}, and is to be read "
            f"as {dtype.base_dtype.name}."
        )


def _remapped(
    bundle: Bundle,
    stored: StoredTable,
    shape: tuple[int, int],
    rows: np.ndarray,
    columns: np.ndarray,
    fresh: np.ndarray,
) -> np.ndarray:
    """Computes the result of the operation LoadAndRemapMatrix.

    Args:
        bundle, stored: the matrix.
        shape: the shape of the result.
        rows, columns: the old row of each row and the old column of each column, -1 for none; no
            columns at all if they stay as they are.
        fresh: the values of elements without an old row or column, in their order.
    """
    if not len(columns):
        columns = np.arange(stored.dim)
    for remapping, extent, there, kind in (
        (rows, shape[0], stored.count, "row"),
        (columns, shape[1], stored.dim, "column"),
    ):
        found = remapping[remapping >= 0]
        if len(remapping) != extent or len(found) and found.max() >= there:
            raise ValueError(
                f"'{stored.name}' has the shape [{stored.count}, {stored.dim}] in checkpoint "
                f"'{bundle.prefix}', and {len(remapping)} {kind}s up to number "
                f"{max(found, default=-1)} of it are to become {extent}."
            )
        if len(np.unique(found)) < len(found):
            raise ValueError(
                f"a {kind} of '{stored.name}' in checkpoint '{bundle.prefix}' is to become several "
                f"{kind}s: {remapping.tolist()[:20]}."
            )
    is_fresh = (rows < 0)[:, None] | (columns < 0)[None, :]
    if is_fresh.sum() != fresh.size:
        raise ValueError(
            f"'{stored.name}' in checkpoint '{bundle.prefix}': "
            f"initializing_values has {counted(fresh.size, 'value')}, and the elements that are "
            f"not in the checkpoint need {is_fresh.sum()}."
        )
    out = np.empty(shape, np.float32)
    out[is_fresh] = fresh.reshape(-1)
    kept, taken = np.flatnonzero(rows >= 0), np.flatnonzero(columns >= 0)

    def receive(places: np.ndarray, values: np.ndarray) -> None:
        out[np.ix_(kept[places], taken)] = values[:, columns[taken]]

    table_reader.read_rows(bundle, stored, rows[kept], receive)
    return out
