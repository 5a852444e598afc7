"""Reads checkpoints of DeepRec, which keep embedding variables in a TensorFlow checkpoint.

An embedding variable `emb` has these entries:

    emb-keys, -values              [n] int32 or int64, [n, D]: admitted keys and their rows
    emb-freqs, -versions           [n] int64: how often keys occurred, global steps of their last
                                   update ([0] if they weren't recorded)
    emb-keys_filtered, -freqs_filtered, -versions_filtered    the same for keys without rows
    emb-partition_offset, -partition_filter_offset    [1001] int32: keys are in the order of
                                   key mod 1000, for readers with other numbers of partitions

A partitioned variable has them for `emb/part_0`, `emb/part_1`, …. A slot is itself an embedding
variable with the same keys, named `emb/Adagrad` or `emb/part_0/Adagrad`. Everything else is as
TensorFlow saves it, including variables that a TensorFlow partitioner has cut.

Sources: DeepRec's `embedding_var_ckpt_data.cc` (`ExportToCkpt`), `saveable_object_util.py`
(`EmbeddingVariableSaveable`), `slot_creator.py`, and its page on admission, which lists the nine
entries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint.files.layout import LAYOUT_ENTRY
from collective.checkpoint.files.tensor_bundle import WHOLE_READ_BYTES, Bundle, slice_rows
from collective.checkpoint.importing.source import (
    KeyedRows,
    KeyedTable,
    Source,
    variable_of_entry,
)
from collective.checkpoint.reading import table_reader
from collective.ops.counting import counted
from collective.tensorflow_internals.variables import base as trackable

SUFFIXES = (
    "keys",
    "values",
    "freqs",
    "versions",
    "keys_filtered",
    "freqs_filtered",
    "versions_filtered",
    "partition_offset",
    "partition_filter_offset",
)
PART = re.compile(r"(?P<table>.+?)/part_(?P<part>\d+)(?P<slot>/.+)?")
INT64 = np.dtype(np.int64)


class Piece(NamedTuple):
    """Describes one partition of an embedding variable.

    Attributes:
        part: its number.
        stem: the beginning of its entries' names.
    """

    part: int
    stem: str


def read(path: str) -> Source:
    """Describes a checkpoint of DeepRec.

    Args:
        path: its prefix, or a folder, whose latest checkpoint is read.

    Raises:
        ValueError: there is no checkpoint; a partition is missing, or has keys without values; or
            rows are in separate files.
    """
    bundle = open_foreign(path)
    _refuse_rows_on_disk(bundle)
    source = Source(bundle.prefix)
    taken = add_embedding_variables(bundle, source)
    add_variables(bundle, source, taken)
    return source


def open_foreign(path: str) -> Bundle:
    """Opens a checkpoint that another library has written."""
    bundle = table_reader.open_bundle(path)
    if LAYOUT_ENTRY in bundle.entries:
        raise ValueError(
            f"checkpoint '{bundle.prefix}' is one of this library: it needs no import."
        )
    bundle.check_files()
    return bundle


def _refuse_rows_on_disk(bundle: Bundle) -> None:
    records = tf.io.gfile.glob(f"{bundle.prefix}-*-ssd_record.index")
    if records:
        raise ValueError(
            f"checkpoint '{bundle.prefix}' keeps rows in files of their own ({records[0]}), which "
            "can't be read. Restore it in DeepRec with StorageType.DRAM, and save it there once."
        )


def add_embedding_variables(bundle: Bundle, source: Source) -> set[str]:
    """Adds the embedding variables of a checkpoint; returns the names of all their entries."""
    pieces_by_name: dict[str, list[Piece]] = {}
    taken: set[str] = set()
    for entry in sorted(bundle.entries):
        stem = entry[: -len("-keys")]
        if not entry.endswith("-keys") or f"{stem}-values" not in bundle.entries:
            continue
        cut = PART.fullmatch(stem)
        name = stem if cut is None else cut["table"] + (cut["slot"] or "")
        part = 0 if cut is None else int(cut["part"])
        pieces_by_name.setdefault(name, []).append(Piece(part, stem))
        taken |= {f"{stem}-{suffix}" for suffix in SUFFIXES} & bundle.entries.keys()
    for name, pieces in sorted(pieces_by_name.items()):
        pieces.sort()
        if [piece.part for piece in pieces] != list(range(len(pieces))):
            missing = min(set(range(len(pieces))) - {piece.part for piece in pieces})
            raise ValueError(
                f"checkpoint '{bundle.prefix}': part_{missing} of embedding variable '{name}' is "
                f"missing (there is {', '.join(piece.stem for piece in pieces)})."
            )
        if name.rpartition("/")[0] not in pieces_by_name:
            slots = [
                _rows(bundle, other, pieces_by_name[other], "values")
                for other in sorted(pieces_by_name)
                if other.rpartition("/")[0] == name
            ]
            source.tables.append(_table(bundle, source, name, pieces, slots))
    return taken


def _table(
    bundle: Bundle, source: Source, name: str, pieces: Sequence[Piece], slots: list[KeyedRows]
) -> KeyedTable:
    rows = _rows(bundle, name, pieces, "values")
    for suffix, slot in (("freqs", "frequency"), ("versions", "last_used")):
        recorded = [f"{piece.stem}-{suffix}" for piece in pieces]
        if all(entry in bundle.entries for entry in recorded):
            counts = sum(bundle.entries[entry][1][0] for entry in recorded)
            if counts == rows.count and counts:
                slots.append(_rows(bundle, f"{name}/{slot}", pieces, suffix))
            elif counts:
                source.left_out[f"{name}-{suffix}"] = (
                    f"there are {counts:,} for {counted(rows.count, 'key')}"
                )
    refused = None
    filtered = [f"{piece.stem}-keys_filtered" for piece in pieces]
    if sum(bundle.entries[e][1][0] for e in filtered if e in bundle.entries):
        refused = _rows(bundle, f"{name}/refused", pieces, "freqs_filtered", "keys_filtered")
        source.left_out[f"{name}-versions_filtered"] = (
            "keys without rows have counts here, no last use"
        )
    return KeyedTable(rows, slots, refused)


def _rows(
    bundle: Bundle, name: str, pieces: Sequence[Piece], values: str, keys: str = "keys"
) -> KeyedRows:
    """Describes a variable whose partitions have the entries `-<keys>` and `-<values>`."""
    counts, dims, dtypes = [], set(), set()
    for piece in pieces:
        key_shape = bundle.entries[f"{piece.stem}-{keys}"][1]
        dtype, shape = bundle.entries[f"{piece.stem}-{values}"]
        if shape[:1] != key_shape or len(shape) > 2:
            raise ValueError(
                f"checkpoint '{bundle.prefix}': '{piece.stem}' has keys {list(key_shape)} and "
                f"{values} {list(shape)}: it is damaged, or no embedding variable."
            )
        counts.append(shape[0])
        dims.add(shape[1] if len(shape) == 2 else 1)
        dtypes.add(np.dtype(dtype))
    if len(dims) > 1 or len(dtypes) > 1:
        raise ValueError(
            f"checkpoint '{bundle.prefix}': the partitions of '{name}' differ in their dimension "
            f"or type ({sorted(dims)}, {sorted(map(str, dtypes))})."
        )
    dim, dtype = dims.pop(), dtypes.pop()

    def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        block = slice_rows(dim, dtype)
        for piece, count in zip(pieces, counts):
            cursors = [
                table_reader.RowCursor(
                    bundle, f"{piece.stem}-{suffix}", count, max(1, count), WHOLE_READ_BYTES
                )
                for suffix in (keys, values)
            ]
            for first in range(0, count, block):
                part_keys, rows = (c.take(min(block, count - first)) for c in cursors)
                rows = rows.reshape(len(rows), dim)
                if values == "versions":
                    rows = np.maximum(rows, 0)  # none is -1 there and 0 here
                yield part_keys.astype(INT64), rows

    stems = [piece.stem for piece in pieces]
    shown = stems[0] if len(stems) == 1 else f"{stems[0]} … {PART.fullmatch(stems[-1])['part']}"  # type: ignore[index]
    return KeyedRows(name, dim, dtype, sum(counts), blocks, f"{shown}-{values}")


def add_variables(bundle: Bundle, source: Source, taken: set[str]) -> None:
    """Adds all entries except those in `taken`, unchanged."""
    for name in sorted(bundle.entries.keys() - taken):
        if name == trackable.OBJECT_GRAPH_PROTO_KEY:
            source.left_out[name] = "variables are taken by their names"
            continue
        owner = name.rpartition("/")[0]
        source.variables.append(
            variable_of_entry(bundle, name, owner if owner in bundle.entries else None)
        )
