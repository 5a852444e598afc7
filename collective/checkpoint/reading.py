"""Opens checkpoints with their increments, and reads tables of them, without ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint import chain, merged_reader
from collective.checkpoint.chain import Chain
from collective.checkpoint.compatibility import find_stored_table
from collective.checkpoint.layout import DYNAMIC, StoredTable


def open_checkpoint(path: str) -> Chain:
    """Opens the checkpoint or state `path`, or the newest one in the folder `path`."""
    if tf.io.gfile.isdir(path):
        latest = tf.train.latest_checkpoint(path)
        if latest is None:
            raise ValueError(f"There is no checkpoint in '{path}'.")
        path = latest
    return chain.open_chain(path)


def read_table(
    path: str, name: str, block: int, frequencies: bool = False, last_used: bool = False
) -> Iterator[tuple[Any, ...]]:
    """Reads a table (see `collective.checkpoint.read_table`)."""
    if block < 1:
        raise ValueError(f"block must be at least 1, not {block}.")
    opened = open_checkpoint(path)
    bundle = opened.base
    stored = find_stored_table(bundle, name)
    if stored is None:
        matrices = (n for n, (_, shape) in bundle.entries.items() if len(shape) == 2)
        tables = sorted(bundle.layout.tables) or sorted(matrices)
        raise ValueError(
            f"checkpoint '{bundle.prefix}' has no table '{name}' (it has: "
            f"{', '.join(tables) or 'none'})."
        )
    beside: list[StoredTable] = []
    if frequencies:
        counts = find_stored_table(bundle, f"{stored.name}/frequency")
        if stored.kind != DYNAMIC or counts is None:
            raise ValueError(
                f"checkpoint '{bundle.prefix}' has no frequencies of '{name}': they are those of "
                "dynamic tables that were saved with TablePolicy(filter_freq=…)."
            )
        beside.append(counts)
    if last_used:
        steps = find_stored_table(bundle, f"{stored.name}/last_used")
        if stored.kind != DYNAMIC or steps is None:
            raise ValueError(
                f"checkpoint '{bundle.prefix}' doesn't tell when rows of table '{name}' were used "
                "last: no option of its policy needed it."
            )
        beside.append(steps)
    if beside:
        blocks = read_dynamic_tables(opened, [stored, *beside], block)
        return ((keys, rows, *(x[:, 0] for x in others)) for keys, (rows, *others) in blocks)
    if stored.kind == DYNAMIC:
        return ((keys, values[0]) for keys, values in read_dynamic_tables(opened, [stored], block))
    return merged_reader.read_static(opened, stored, block)


def read_dynamic_tables(
    opened: Chain, stored_tables: list[StoredTable], block: int
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Yields (keys [b], [rows [b, D] of each]) of a dynamic table of the base, and slots of it."""
    return merged_reader.read_dynamic(opened, stored_tables, block)
