"""Which operations compute around an exchange: one place chooses, by device.

On a CPU it is the compiled library (`ops/native`), on a GPU CuPy's kernels (`ops/gpu`), which stand
in the graph as calls of Python. Who asks of an operation which it is, or for an attribute of it,
asks here.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import native_library, op_attributes, placement

_inside = threading.local()


@contextlib.contextmanager
def about(tables: Sequence[str], in_host_memory: bool) -> Iterator[None]:
    """Inside, `operations` are those for these tables: in the host's memory, or where kernels
    compute.
    """
    before, _inside.about = getattr(_inside, "about", ((), False)), (tuple(tables), in_host_memory)
    try:
        yield
    finally:
        _inside.about = before


def operations() -> Any:
    """What has the operations of the compiled library: itself, or what stands in for it.

    Raises:
        ImportError: the compiled library can't be used here; it says why.
        RuntimeError: CuPy can't; it says why.
    """
    tables, in_host_memory = getattr(_inside, "about", ((), False))
    return (
        native_library.library()
        if placement.chosen() == "cpu" or in_host_memory
        else _stand_in().about(tables)
    )


def _stand_in() -> Any:
    return placement.stand_in() or _on_gpu()


@functools.cache
def _on_gpu() -> Any:
    # needs no CuPy, but takes a while to import
    from collective.ops.gpu.memory_bridge import GpuBridge
    from collective.ops.gpu.tensorflow_binding import DeviceOperations

    return DeviceOperations(GpuBridge())


def bridge() -> Any:
    """Returns what shares memory with kernels: a `collective.ops.gpu.memory_bridge.MemoryBridge`."""
    return _stand_in().bridge


def operations_of(op: tf.Operation) -> Any:
    """Those of which `op` is one."""
    return (
        _stand_in().about(op_attributes.attribute(op, "of"))
        if op_attributes.stands_in(op)
        else native_library.library()
    )


def device(dynamic: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Where the memory of dynamic tables is, or of static ones: `tf.device` for it, or where a
    script has them.
    """
    return (
        tf.device("/gpu:0")
        if placement.chosen() == "gpu" and placement.on_device(dynamic)
        else contextlib.nullcontext()
    )
