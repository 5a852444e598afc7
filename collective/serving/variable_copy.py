"""Copies the variables of a graph to be served; each rank copies its parts of the tables."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import tensorflow.compat.v1 as tf

from collective.checkpoint.files import commit, tensor_bundle
from collective.checkpoint.files.tensor_bundle import Bundle
from collective.checkpoint.reading.compatibility import tensors_saved_by
from collective.coordination.barrier import Steps
from collective.errors import RankError
from collective.ops.communication import collectives
from collective.ops.counting import counted
from collective.ops.graph import graph_analysis
from collective.serving import variable_files
from collective.serving.base_version import BaseVersion
from collective.serving.export_record import ExportedFile
from collective.serving.variable_files import EntryReader, VariableFiles


class TablePart(NamedTuple):
    """Says from where a part of a table is copied.

    Attributes:
        entry: the name in the checkpoint.
        part: its number: rank `part` mod N copies it.
        block: rows read at once; 0: as many as a slice may have.
        keys: the name in the checkpoint of the rows' keys, of a dynamic table.
    """

    entry: str
    part: int
    block: int
    keys: str | None = None


class CopiedVariables(NamedTuple):
    """Tells what `copy_variables` has made.

    Attributes:
        path: the checkpoint's prefix.
        most: bytes of a table in a data file.
        data_files: what the data files are, by their paths in the SavedModel.
        problem: why files of the base could not be linked; '' if they could.
    """

    path: str
    most: int
    data_files: dict[str, ExportedFile]
    problem: str


def copy_variables(
    source: Bundle,
    part_of: Callable[[str, Any], TablePart | None],
    graph: tf.Graph,
    saver: Any,
    path: str,
    steps: Steps,
    base: BaseVersion | None,
) -> CopiedVariables:
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
        base: the version whose files are linked where they are the same; None: all are written.

    Returns:
        What was made. Rank 0 still merges the files: they are there when the ranks have met once
        more.

    Raises:
        ValueError: `source` lacks a variable or has it in another shape, or the graph holds more
            than TensorFlow's own operations, or `base` is of another model.
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
    if rank == 0 and base is not None:
        _check_base(base, set(names))
    folder = os.path.dirname(path)
    if not commit.becomes_visible(folder):
        raise RankError(
            f"rank {rank} doesn't see the folder {folder} that rank 0 has made. Export to a file "
            "system that all ranks have in common."
        )
    total = sum(source.stored_bytes(part.entry) for part in table_parts.values())
    record = None if base is None else base.record
    known = None if record is None else record.data_file_bytes
    most = variable_files.file_bytes(total, known)
    files = VariableFiles(os.path.join(folder, f"part-{rank}"), most, base)
    for name in names:
        if name in table_parts:
            part = table_parts[name]
            if part.part % ranks == rank:
                keys = part.keys and EntryReader(source, part.keys, part.block)
                files.add_table_part(
                    name, EntryReader(source, part.entry, part.block), keys or None
                )
        elif rank == 0:
            files.add_other(name, source.read_whole(name))
    messages = steps.meet(
        {
            "written": [(prefix, file.to_json()) for prefix, file in files.close()],
            "problem": "" if base is None else base.problem,
        }
    )
    written = [entry for message in messages for entry in message["written"]]
    prefixes = [str(prefix) for prefix, _ in written]
    if rank == 0 and prefixes:
        for prefix in prefixes:
            index = tensor_bundle.index_path(prefix)
            if not commit.becomes_visible(index):
                raise RankError(
                    f"rank 0 doesn't see {index} that another rank has written. Export to a file "
                    "system that all ranks have in common."
                )
        tensor_bundle.merge(prefixes, path)
    data_files = {
        os.path.join(
            os.path.basename(folder),
            os.path.basename(tensor_bundle.data_path(path, number, len(written))),
        ): ExportedFile.from_json(file)
        for number, (_, file) in enumerate(written)
    }
    problems = [str(message["problem"]) for message in messages if message["problem"]]
    return CopiedVariables(path, most, data_files, problems[0] if problems else "")


def _check_base(base: BaseVersion, names: set[str]) -> None:
    """Refuses a base that has none of the variables: a wrong path, surely."""
    others = base.variables()
    if names and others and not names & others:
        raise ValueError(
            f"base '{base.path}' is of another model: it has the variables "
            f"{_some(others)}, and the graph to be served has {_some(names)}. Name a version of "
            "this model, or export without base=, which writes everything."
        )


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (" and others" if len(names) > 3 else "")


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
