"""Chooses by device the operations that compute before and after an exchange.

All are of the same types: those of the compiled library, on a CPU (`ops/native`) or on a GPU
(`ops/native/gpu`), where they launch the kernels of `ops/gpu`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import kernel_device, native_library
from collective.ops.graph import device_scopes

_current = threading.local()


@contextlib.contextmanager
def in_host_memory(applies: bool) -> Iterator[None]:
    """Inside, `operations` are those for tables in host memory; else those where kernels are."""
    previous = _is_in_host_memory()
    _current.value = applies
    try:
        yield
    finally:
        _current.value = previous


def _is_in_host_memory() -> bool:
    return bool(getattr(_current, "value", False))


def operations() -> Any:
    """Returns an object with the operations of the compiled library: the library, or an object
    whose operations launch kernels.

    Raises:
        ImportError: the compiled library can't be used here; says why.
        RuntimeError: CuPy can't be used; says why.
    """
    return _by_kernels() if launch_kernels() else native_library.on_host()


def launch_kernels() -> bool:
    """Tells whether `operations` launch kernels."""
    return kernel_device.chosen() != "cpu" and not _is_in_host_memory()


def _by_kernels() -> Any:
    return kernel_device.injected() or _on_gpu()


@functools.cache
def _on_gpu() -> Any:
    # The import doesn't need CuPy, but takes a while.
    from collective.ops.gpu.memory_bridge import GpuBridge
    from collective.ops.gpu.tensorflow_binding import DeviceOperations

    return DeviceOperations(GpuBridge())


def bridge() -> Any:
    """Returns the `collective.ops.gpu.memory_bridge.MemoryBridge` to the memory of kernels."""
    return _by_kernels().bridge


def operations_given(sizes: Sequence[tf.Tensor]) -> Any:
    """Returns the operations one of which was given these sizes of a message, in host
    memory. Only operations that launch kernels need the sizes: others read the message itself.
    """
    return _by_kernels() if sizes else native_library.on_host()


def device(dynamic: bool = False) -> contextlib.AbstractContextManager[None]:
    """Places operations that are made inside where dynamic tables are, or static ones."""
    if not kernel_device.on_device(dynamic):
        return device_scopes.on_host()
    return device_scopes.on("/gpu:0" if kernel_device.chosen() == "gpu" else None)
