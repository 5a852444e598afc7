"""Copies the variables of a graph that is to be served from a checkpoint, each rank its parts of
the tables.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from collective.checkpoint import commit, tensor_bundle
from collective.checkpoint.compatibility import saved_by
from collective.checkpoint.tensor_bundle import Bundle
from collective.coordination.barrier import Steps
from collective.errors import RankError
from collective.ops import collectives, graph_analysis


class Source(NamedTuple):
    """Where a part of a table is copied from.

    Attributes:
        entry: of the checkpoint.
        part: its number: rank `part` mod N copies it.
        block: rows copied at once; 0: as many as a slice may have.
    """

    entry: str
    part: int
    block: int


def copy_variables(
    source: Bundle,
    part_of: Callable[[str, Any], Source | None],
    graph: tf.Graph,
    saver: Any,
    path: str,
    steps: Steps,
) -> str:
    """Writes the checkpoint `path` of what `saver` saves, with the values that `source` has. Called
    on every rank.

    Args:
        source: the checkpoint that was trained.
        part_of: given what is saved, and under which name, where that comes from if it is a part of
            a table.
        graph: the saver's.
        saver: a `tf.train.Saver`; what isn't a part of a table is in `source` under the name that
            the saver has for it.
        path: the new checkpoint's prefix; rank 0's counts.
        steps: in which the ranks do it.

    Returns:
        `path`. Rank 0 still merges the files; the next of `steps` is when all is there.

    Raises:
        ValueError: `source` lacks a variable or has it in another shape, or the graph holds more
            than TensorFlow's own operations.
        RankError: the ranks' graphs differ, or they have no file system in common.
    """
    _refuse_foreign(graph)
    wanted = {} if saver._is_empty else saved_by(graph, saver.saver_def)
    tables = {
        name: part for name, saved in wanted.items() if (part := part_of(name, saved)) is not None
    }
    _check(source, tables, wanted)
    names = hashlib.blake2b("\n".join(sorted(wanted)).encode(), digest_size=8).hexdigest()
    told = steps.meet({"path": path, "variables": names, "count": len(wanted)})
    if len({text["variables"] for text in told}) > 1:
        raise RankError(
            "The ranks built different graphs to be served, of "
            + ", ".join(f"{text['count']} variables on rank {r}" for r, text in enumerate(told))
            + ". Build the same one on every rank."
        )
    rank, ranks, path = collectives.rank(), collectives.size(), str(told[0]["path"])
    if not commit.appears(os.path.dirname(path)):
        raise RankError(
            f"rank {rank} doesn't see the folder {os.path.dirname(path)} that rank 0 "
            f"has made. Export to a file "
            "system that all ranks have in common."
        )
    writer = tensor_bundle.Writer(os.path.join(os.path.dirname(path), f"part-{rank}"))
    for name in sorted(wanted):
        if name in tables:
            if tables[name].part % ranks == rank:
                _copy(source, name, tables[name], writer)
        elif rank == 0:
            writer.add_whole(name, source.read_whole(name))
    written = [
        prefix for text in steps.meet({"written": writer.close()}) for prefix in text["written"]
    ]
    if rank == 0 and written:
        unseen = [prefix for prefix in written if not commit.appears(f"{prefix}.index")]
        if unseen:
            raise RankError(
                f"rank 0 doesn't see {unseen[0]}.index that another rank has written. "
                f"Export to a file system that "
                "all ranks have in common."
            )
        tensor_bundle.merge(written, path)
    return path


def _copy(source: Bundle, name: str, part: Source, writer: tensor_bundle.Writer) -> None:
    dtype, shape = source.entries[part.entry]
    block = part.block or tensor_bundle.slice_rows(int(np.prod(shape[1:])), dtype)
    for first in range(0, shape[0], block):
        writer.add(name, shape, first, source.read(part.entry, first, min(block, shape[0] - first)))


def _check(source: Bundle, tables: dict[str, Source], wanted: dict[str, Any]) -> None:
    entries = {name: tables[name].entry if name in tables else name for name in wanted}
    missing = sorted(name for name, entry in entries.items() if entry not in source.entries)
    if missing:
        raise ValueError(
            f"checkpoint '{source.prefix}' lacks {', '.join(missing)}, which the "
            f"graph to be served has. "
            "Build it with the names that were trained."
        )
    for name, tensor in wanted.items():
        dtype, shape = source.entries[entries[name]]
        if tensor is not None and (
            tensor.dtype.base_dtype != tf.as_dtype(dtype)
            or not tensor.shape.is_compatible_with(shape)
        ):
            raise ValueError(
                f"variable '{name}' is {tensor.shape} {tensor.dtype.base_dtype.name} in the graph "
                f"to be served, and "
                f"{tf.TensorShape(shape)} {tf.as_dtype(dtype).name} in checkpoint "
                f"'{source.prefix}'. Build it as it was "
                "trained."
            )


def _refuse_foreign(graph: tf.Graph) -> None:
    """A SavedModel with such operations would need this library, or this very process, to be
    loaded.
    """
    foreign = sorted(
        {
            f"{node.name} ({node.op})"
            for node in _nodes(graph)
            if graph_analysis.is_horovod(node.op)
            or node.op in ("PyFunc", "PyFuncStateless", "EagerPyFunc")
        }
    )
    if foreign:
        raise ValueError(
            f"The graph to be served has operations that TensorFlow alone can't run: "
            f"{', '.join(foreign)}. Build "
            "it of operations of TensorFlow (no tf.py_function, no "
            "tf.numpy_function), and its tables inside "
            "embedding_scope()."
        )


def _nodes(graph: tf.Graph) -> Iterator[Any]:
    whole = graph.as_graph_def()
    yield from whole.node
    for function in whole.library.function:
        yield from function.node_def
