"""Determines how datasets were made: whether they are dealt, and whether the same on all ranks."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.graph import graph_analysis
from collective.tensorflow_internals.graphs import config

# Begins the name of the operation by which `collective.data.parquet` deals batches.
DEALT_BY_READER = "collective/data/ShardDataset"
# Begins the names of the operations of both, and of `collective.data.records`.
OF_READERS = "collective/data/"
# Begins the names of the operations by which `collective.data.resumable` does.
RESUMABLE = "collective/data/resumable/"
# Begins the names of those by which a `collective.data.WorkQueue` gives a rank its items.
OF_WORK_QUEUE = "collective/data/work_queue/"


def is_dealt_by_reader(dataset: Any) -> bool:
    """Tells whether the source of a dataset is dealt: batches of `parquet`, items of work."""
    dealt = (DEALT_BY_READER, OF_WORK_QUEUE)
    if any(op.name.startswith(dealt) for op in operations(dataset)):
        return True
    return any(hasattr(part, "collective_is_dealt") for part in eager_parts(dataset))


def is_of_work_queue(dataset: Any) -> bool:
    """Tells whether a graph's dataset is made of the items of a `collective.data.WorkQueue`."""
    return any(op.name.startswith(OF_WORK_QUEUE) for op in operations(dataset))


def is_of_reader(dataset: Any) -> bool:
    """Tells whether a dataset is made of batches that the library reads or has dealt."""
    return any(op.name.startswith(OF_READERS) for op in operations(dataset))


def is_resumable(dataset: Any) -> bool:
    """Tells whether a dataset is made of batches of `collective.data.resumable`."""
    return any(op.name.startswith(RESUMABLE) for op in operations(dataset))


def is_sharded(dataset: Any) -> bool:
    if any(op.type == "ShardDataset" for op in operations(dataset)):
        return True
    return any(type(part).__name__ == "_ShardDataset" for part in eager_parts(dataset))


def shuffles_differently(dataset: Any) -> bool:
    """Tells whether every rank would shuffle the dataset in a different order."""
    made = operations(dataset)
    seed_pairs = [op.inputs[2:4] for op in made if op.type.startswith("Shuffle")]
    seed_pairs += [op.inputs[:2] for op in made if op.type.startswith("RandomDataset")]
    for part in eager_parts(dataset):
        if type(part).__name__.startswith(("_Shuffle", "_RandomDataset")):
            seed_pairs.append((part._seed, part._seed2))
    for pair in seed_pairs:
        seeds = [tf.get_static_value(seed) for seed in pair]
        if all(seed is not None and int(seed) == 0 for seed in seeds):
            return True
    return False


def is_shuffled(dataset: Any) -> bool:
    """Tells whether a graph's dataset has an order that follows from seeds."""
    return any(op.type.startswith("Shuffle") for op in operations(dataset))


@contextlib.contextmanager
def drawn_seeds() -> Iterator[None]:
    """Notes that the seeds of datasets made inside may differ in another job."""
    _drawing.append(True)
    try:
        yield
    finally:
        _drawing.pop()


def are_seeds_drawn() -> bool:
    """Tells whether `drawn_seeds` says so here."""
    return bool(_drawing)


_drawing: list[bool] = []

# Operations that call Python.
PYTHON = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})


def unordered(dataset: Any) -> str | None:
    """Returns the name of an operation that may change the order, whatever its dataset's options.

    None if there is none, or if TensorFlow is told to be deterministic, which overrides it. In a
    dataset that was made eagerly, `interleave()` is unknown, because it doesn't keep its arguments.
    """
    if config.is_op_determinism_enabled():
        return None
    for op in operations(dataset):
        attributes = op.node_def.attr
        if "deterministic" in attributes and attributes["deterministic"].s == b"false":
            return str(op.type)
    for part in eager_parts(dataset):
        if hasattr(part, "_deterministic") and part._deterministic == "false":
            return type(part).__name__.lstrip("_")
    return None


def operations(dataset: Any) -> set[tf.Operation]:
    """Returns the operations that make `dataset`; none if it was made eagerly."""
    if _is_eager(dataset):
        return set()
    return graph_analysis.walk([dataset._variant_tensor.op], control=False)


def eager_parts(dataset: Any) -> list[Any]:
    """Returns the datasets that `dataset` was made from, and itself; none if it is a graph's."""
    if not _is_eager(dataset):
        return []
    parts: dict[int, Any] = {}
    waiting = [dataset]
    while waiting:
        part = waiting.pop()
        if id(part) in parts:
            continue
        parts[id(part)] = part
        # tf.compat.v1 wraps each dataset in another, whose inputs are those of the wrapped one.
        waiting += [part._dataset] if isinstance(part, tf.data.Dataset) else part._inputs()
    return list(parts.values())


def eager_sources(dataset: Any) -> list[list[Any]]:
    """Returns the tensors of each dataset of tensors, or slices of them, that it was made from.

    There are none if it is a graph's.
    """
    kinds = ("_TensorSliceDataset", "_TensorDataset")
    parts = [part for part in eager_parts(dataset) if type(part).__name__ in kinds]
    return [[x for x in part._tensors if x.dtype != tf.variant] for part in parts]


def calls_python(dataset: Any) -> bool:
    """Tells whether a function of an eager dataset calls Python."""
    graphs = [function.graph for function in _functions(dataset)]
    return any(
        op.type in PYTHON or graph_analysis.has_inside(graph, op, PYTHON.__contains__)
        for graph in graphs
        for op in graph.get_operations()
    )


def functions_digest(dataset: Any) -> int:
    """Returns 63 bits of an eager dataset's functions: operations, constants, what they capture."""
    parts = []
    for function in _functions(dataset):
        parts += [_content(op) for op in function.graph.get_operations()]
        captured = [x for x in function.captured_inputs if hasattr(x, "numpy")]
        parts += [
            tf.io.serialize_tensor(x).numpy() for x in captured if x.dtype.is_numpy_compatible
        ]
    return digest_of(b"".join(hashlib.blake2b(part, digest_size=16).digest() for part in parts))


def _functions(dataset: Any) -> list[Any]:
    """Returns the functions of an eager dataset, at any depth of datasets, not of functions."""
    parts = [part for part in eager_parts(dataset) if not isinstance(part, tf.data.Dataset)]
    return [function.function for part in parts for function in part._functions()]


def _is_eager(dataset: Any) -> bool:
    variant = dataset._variant_tensor
    return not isinstance(variant, tf.Tensor) or not hasattr(variant, "op")


def digest(dataset: Any) -> int:
    """Returns 63 bits of a graph's dataset: of its operations and their constants.

    File names, seeds, sizes and arrays are constants. The bodies of functions don't count.
    """
    parts = []
    for op in operations(dataset):
        parts.append(hashlib.blake2b(_content(op), digest_size=16).digest())
    return digest_of(b"".join(sorted(parts)) + str(dataset.element_spec).encode())


def _content(op: tf.Operation) -> bytes:
    """Returns what an operation is, with its value if it is a constant."""
    value = op.node_def.attr["value"].tensor.SerializeToString() if op.type == "Const" else b""
    return op.type.encode() + b" " + value


def digest_of(content: bytes) -> int:
    """Returns 63 bits of `content`."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1
