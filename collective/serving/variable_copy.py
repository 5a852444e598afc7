"""Copies the variables of a graph to be served; each rank copies its parts of the tables."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint import commit, tensor_bundle
from collective.checkpoint.compatibility import tensors_saved_by
from collective.checkpoint.tensor_bundle import Bundle, BundleWriter
from collective.coordination.barrier import Steps
from collective.errors import RankError
from collective.ops import collectives, graph_analysis
from collective.ops.counting import counted


class TablePart(NamedTuple):
    """Says from where a part of a table is copied.

    Attributes:
        entry: the name in the checkpoint.
        part: its number: rank `part` mod N copies it.
        block: rows copied at once; 0: as many as a slice may have.
    """

    entry: str
    part: int
    block: int


def copy_variables(
    source: Bundle,
    part_of: Callable[[str, Any], TablePart | None],
    graph: tf.Graph,
    saver: Any,
    path: str,
    steps: Steps,
) -> str:
    """Writes the checkpoint `path` of a saver's variables, with their values in `source`.

    Every rank calls it.

    Args:
        source: the checkpoint that was trained.
        part_of: given the name of a saved tensor and the tensor, returns the part of a table from
            which it comes, if it comes from one.
        graph: the saver's.
        saver: a `tf.train.Saver`; everything that isn't a part of a table is in `source` under the
            name that the saver has for it.
        path: the new checkpoint's prefix; rank 0's counts.
        steps: the meetings of the ranks.

    Returns:
        `path`. Rank 0 still merges the files: they are there when the ranks have met once more.

    Raises:
        ValueError: `source` lacks a variable or has it in another shape, or the graph holds more
            than TensorFlow's own operations.
        RankError: the ranks' graphs differ, or they have no file system in common.
    """
    _refuse_foreign_operations(graph)
    saved_tensors = {} if saver._is_empty else tensors_saved_by(graph, saver.saver_def)
    table_parts = {}
    for name, tensor in saved_tensors.items():
        table_part = part_of(name, tensor)
        if table_part is not None:
            table_parts[name] = table_part
    _check_variables(source, table_parts, saved_tensors)
    names = sorted(saved_tensors)
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()
    messages = steps.meet({"path": path, "variables": digest, "count": len(names)})
    if len({message["variables"] for message in messages}) > 1:
        counts = (
            f"{counted(message['count'], 'variable')} on rank {r}"
            for r, message in enumerate(messages)
        )
        raise RankError(
            f"The ranks built different graphs to be served, of {', '.join(counts)}. Build the "
            "same one on every rank."
        )
    rank, ranks, path = collectives.rank(), collectives.size(), str(messages[0]["path"])
    folder = os.path.dirname(path)
    if not commit.becomes_visible(folder):
        raise RankError(
            f"rank {rank} doesn't see the folder {folder} that rank 0 has made. Export to a file "
            "system that all ranks have in common."
        )
    writer = BundleWriter(os.path.join(folder, f"part-{rank}"))
    for name in names:
        if name in table_parts:
            if table_parts[name].part % ranks == rank:
                _copy_part(source, name, table_parts[name], writer)
        elif rank == 0:
            writer.add_whole(name, source.read_whole(name))
    messages = steps.meet({"written": writer.close()})
    prefixes = [prefix for message in messages for prefix in message["written"]]
    if rank == 0 and prefixes:
        for prefix in prefixes:
            index = tensor_bundle.index_path(prefix)
            if not commit.becomes_visible(index):
                raise RankError(
                    f"rank 0 doesn't see {index} that another rank has written. Export to a file "
                    "system that all ranks have in common."
                )
        tensor_bundle.merge(prefixes, path)
    return path


def _copy_part(source: Bundle, name: str, table_part: TablePart, writer: BundleWriter) -> None:
    dtype, shape = source.entries[table_part.entry]
    block = table_part.block or tensor_bundle.slice_rows(int(np.prod(shape[1:])), dtype)
    for first in range(0, shape[0], block):
        rows = source.read(table_part.entry, first, min(block, shape[0] - first))
        writer.add(name, shape, first, rows)


def _check_variables(
    source: Bundle, table_parts: dict[str, TablePart], saved_tensors: dict[str, Any]
) -> None:
    entries = {name: name for name in saved_tensors}
    entries.update({name: table_part.entry for name, table_part in table_parts.items()})
    missing = sorted(name for name, entry in entries.items() if entry not in source.entries)
    if missing:
        raise ValueError(
            f"checkpoint '{source.prefix}' lacks {', '.join(missing)}, which the graph to be "
            "served has. Build it with the names that were trained."
        )
    for name, tensor in saved_tensors.items():
        dtype, shape = source.entries[entries[name]]
        if tensor is None:
            continue
        same_dtype = tensor.dtype.base_dtype == tf.as_dtype(dtype)
        if not same_dtype or not tensor.shape.is_compatible_with(shape):
            raise ValueError(
                f"variable '{name}' is {tensor.shape} {tensor.dtype.base_dtype.name} in the graph "
                f"to be served, and {tf.TensorShape(shape)} {tf.as_dtype(dtype).name} in "
                f"checkpoint '{source.prefix}'. Build it as it was trained."
            )


def _refuse_foreign_operations(graph: tf.Graph) -> None:
    """Refuses operations for which a SavedModel would need this library, or this very process."""
    foreign = set()
    for node in _nodes(graph):
        is_python = node.op in ("PyFunc", "PyFuncStateless", "EagerPyFunc")
        if is_python or graph_analysis.is_of_carrier(node.op):
            foreign.add(f"{node.name} ({node.op})")
    if foreign:
        raise ValueError(
            "The graph to be served has operations that TensorFlow alone can't run: "
            f"{', '.join(sorted(foreign))}. Build it of operations of TensorFlow (no "
            "tf.py_function, no tf.numpy_function), and its tables inside embedding_scope()."
        )


def _nodes(graph: tf.Graph) -> Iterator[Any]:
    graph_def = graph.as_graph_def()
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def
