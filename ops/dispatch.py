"""Chooses, by device, the operations that compute around an exchange.

On a CPU it is the compiled library (`ops/native`), on a GPU CuPy's kernels (`ops/gpu`): launched by
operations of the library (`ops/native/gpu`), or by calls of Python that stand in the graph. Whoever
wants to know which of them an operation is, or an attribute of it, asks here.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import native_library, op_attributes, placement

_current = threading.local()


@contextlib.contextmanager
def for_tables(tables: Sequence[str], in_host_memory: bool) -> Iterator[None]:
    """Makes `operations` those for these tables, inside: in the host's memory, or by kernels."""
    previous = _tables_and_memory()
    _current.value = tuple(tables), in_host_memory
    try:
        yield
    finally:
        _current.value = previous


def _tables_and_memory() -> tuple[tuple[str, ...], bool]:
    return getattr(_current, "value", ((), False))


def operations() -> Any:
    """Returns an object with the operations of the compiled library: the library, or its stand-in.

    Raises:
        ImportError: the compiled library can't be used here; it says why.
        RuntimeError: CuPy can't; it says why.
    """
    tables, in_host_memory = _tables_and_memory()
    return (
        native_library.library()
        if placement.chosen() == "cpu" or in_host_memory
        else _stand_in().about(tables)
    )


def _stand_in() -> Any:
    return placement.stand_in() or _on_gpu()


@functools.cache
def _on_gpu() -> Any:
    # The import needs no CuPy, but takes a while.
    from collective.ops.gpu.memory_bridge import GpuBridge
    from collective.ops.gpu.tensorflow_binding import DeviceOperations

    return DeviceOperations(GpuBridge())


def bridge() -> Any:
    """Returns the `collective.ops.gpu.memory_bridge.MemoryBridge` to the memory of kernels."""
    return _stand_in().bridge


def operations_of(op: tf.Operation) -> Any:
    """Returns the operations of which `op` is one."""
    tables = op_attributes.tables(op)
    return native_library.library() if tables is None else _stand_in().about(tables)


def device(dynamic: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Returns `tf.device` for the memory of dynamic tables, or of static ones.

    In the host's memory, tables are where the script has them.
    """
    return (
        tf.device("/gpu:0")
        if placement.chosen() == "gpu" and placement.on_device(dynamic)
        else contextlib.nullcontext()
    )
