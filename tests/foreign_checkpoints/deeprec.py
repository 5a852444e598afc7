"""Writes embedding variables as DeepRec does.

Sources: DeepRec's `embedding_var_ckpt_data.cc` (`ExportToCkpt`, `SetWithPartition`: nine entries,
int64 counters, int32 offsets of 1000 partitions by key mod 1000), `embedding_variable_test.cc`
(names such as `var/part_0-keys`), `saveable_object_util.py` (an entry's name begins with the
variable's shared name, so a slot's with `var/part_0/Adagrad`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow.compat.v1 as tf

PARTITIONS = 1000


def embedding_variable(
    stem: str,
    rows: Mapping[int, np.ndarray],
    freqs: Mapping[int, int] | None = None,
    versions: Mapping[int, int] | None = None,
    filtered: Mapping[int, int] | None = None,
    key_dtype: type = np.int64,
) -> dict[str, np.ndarray]:
    """Returns the entries of an embedding variable, or of one partition of it.

    Args:
        stem: `var`, or `var/part_0`.
        rows: {key: row [D]}.
        freqs, versions: {key: number}; None if they aren't recorded.
        filtered: {key: how often it came}, of keys without rows.
        key_dtype: the keys'.
    """
    # Python's remainder differs from C++'s for negative keys, which DeepRec leaves out.
    order = sorted(rows, key=lambda key: key % PARTITIONS)
    counts = np.bincount([key % PARTITIONS for key in rows], minlength=PARTITIONS)
    filtered = filtered or {}
    filtered_counts = np.bincount([key % PARTITIONS for key in filtered], minlength=PARTITIONS)
    dim = len(next(iter(rows.values()))) if rows else 1

    def numbers(by_key: Mapping[int, int] | None) -> np.ndarray:
        return np.array([] if by_key is None else [by_key[key] for key in order], np.int64)

    values = np.array([rows[key] for key in order], np.float32).reshape(len(rows), dim)
    filtered_order = sorted(filtered, key=lambda key: key % PARTITIONS)
    return {
        f"{stem}-keys": np.array(order, key_dtype),
        f"{stem}-values": values,
        f"{stem}-versions": numbers(versions),
        f"{stem}-freqs": numbers(freqs),
        f"{stem}-keys_filtered": np.array(filtered_order, key_dtype),
        f"{stem}-versions_filtered": np.zeros(len(filtered), np.int64),
        f"{stem}-freqs_filtered": np.array([filtered[k] for k in filtered_order], np.int64),
        f"{stem}-partition_offset": np.cumsum([0, *counts]).astype(np.int32),
        f"{stem}-partition_filter_offset": np.cumsum([0, *filtered_counts]).astype(np.int32),
    }


def write(
    prefix: str,
    entries: Mapping[str, np.ndarray],
    partitioned: Mapping[str, tuple[np.ndarray, int]] | None = None,
) -> None:
    """Writes a TensorFlow checkpoint by TensorFlow's own operation.

    Args:
        prefix: its path.
        entries: by name.
        partitioned: {name: (value, number of slices)}: entries that are saved as slices of rows,
            the first ones a row longer where they differ.
    """
    names, specs, values = list(entries), [""] * len(entries), list(entries.values())
    for name, (value, slices) in (partitioned or {}).items():
        first = 0
        for part in np.array_split(value, slices):
            shape = " ".join(map(str, value.shape))
            rest = ":-" * (value.ndim - 1)
            names.append(name)
            specs.append(f"{shape} {first},{len(part)}{rest}")
            values.append(part)
            first += len(part)
    with tf.Graph().as_default(), tf.Session() as session:
        session.run(
            tf.raw_ops.SaveV2(
                prefix=prefix,
                tensor_names=names,
                shape_and_slices=specs,
                tensors=[tf.constant(value) for value in values],
            )
        )
