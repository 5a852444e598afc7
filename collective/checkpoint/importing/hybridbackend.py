"""Reads checkpoints of HybridBackend, which shards the variables that are looked up.

On N > 1 ranks, rank s has the rows of the keys s, s + N, s + 2N, … in this order
(`collective.ops.placement.ByRemainder`). The ranks save these shards as the slices of one entry
[V, D], one after the other. So the entry has V rows, but row i doesn't belong to key i: rows have
to be permuted. The number of slices tells the number of ranks.

Slots are saved in the same way. Embedding variables of DeepRec are saved as in DeepRec, one
partition per rank, and everything else as in TensorFlow.

Sources: HybridBackend's `embedding/variables.py` (`build_sharded_weights`), `embedding/sharding.py`
(`wraps_embedding_lookup`: `partition_by_modulo`, and by dual modulo, which has the same owners),
`embedding/deeprecev.py`, `training/saver.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from collective.checkpoint.files.tensor_bundle import Bundle, RowSlice, slice_rows
from collective.checkpoint.importing.deeprec import (
    add_embedding_variables,
    add_variables,
    open_foreign,
)
from collective.checkpoint.importing.source import Source, WholeVariable
from collective.ops.placement import ByRemainder

# A table of up to this many bytes is read completely and permuted in memory.
IN_MEMORY_BYTES = 128 << 20


def read(path: str, in_order: Collection[str] = ()) -> Source:
    """Describes a checkpoint of HybridBackend.

    Args:
        path: its prefix, or a folder, whose latest checkpoint is read.
        in_order: the names of variables that are saved in slices but not sharded, because a
            TensorFlow partitioner has cut them.

    Raises:
        ValueError: there is no checkpoint; or a name in `in_order` isn't a variable's.
    """
    bundle = open_foreign(path)
    source = Source(bundle.prefix)
    taken = add_embedding_variables(bundle, source)
    unknown = sorted(set(in_order) - bundle.entries.keys())
    if unknown:
        raise ValueError(
            f"checkpoint '{bundle.prefix}' has no variable {', '.join(unknown)}: --in-order names "
            "its variables."
        )
    for name in sorted(bundle.entries.keys() - taken):
        if len(bundle.entries[name][1]) != 2 or name in in_order:
            continue
        owner = name.rpartition("/")[0]
        slices = bundle.row_slices(name)
        if len(slices) > 1 and is_sharded(slices) and owner not in in_order:
            slot_of = owner if owner in bundle.entries else None
            source.variables.append(_permuted(bundle, name, slices, slot_of))
            taken.add(name)
    add_variables(bundle, source, taken)
    return source


def is_sharded(slices: Sequence[RowSlice]) -> bool:
    """Tells whether the slices have as many rows as the shards of that many ranks would."""
    counts = [part.count for part in slices]
    return counts == ByRemainder(len(slices)).counts(sum(counts))


def _permuted(
    bundle: Bundle, name: str, slices: Sequence[RowSlice], slot_of: str | None
) -> WholeVariable:
    """Describes a sharded variable by ascending keys."""
    dtype, shape = bundle.entries[name]
    placed = ByRemainder(len(slices))

    def whole() -> Iterator[tuple[int, np.ndarray]]:
        stored = bundle.read_whole(name)
        rows = np.empty_like(stored)
        for shard, part in enumerate(slices):
            rows[placed.rows_of(shard)] = stored[part.first : part.first + part.count]
        yield 0, rows

    def blocks() -> Iterator[tuple[int, np.ndarray]]:
        block = slice_rows(shape[1], dtype)
        for first in range(0, shape[0], block):
            rows = np.empty((min(block, shape[0] - first), shape[1]), dtype)
            for shard, part in enumerate(slices):
                rows_of_shard = rows[placed.rows_of(shard, first)]
                start = part.first + placed.count(shard, first)
                rows_of_shard[...] = bundle.read(name, start, len(rows_of_shard), in_place=True)
            yield first, rows

    is_small = bundle.stored_bytes(name) <= IN_MEMORY_BYTES
    return WholeVariable(
        name,
        dtype,
        shape,
        whole if is_small else blocks,
        False,
        f", put in the order of keys from {len(slices)} shards",
        slot_of,
        is_table=True,
    )
