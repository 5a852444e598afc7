"""Keeps what lies on the device from the host, as a GPU does.

The double's device memory is the host's, so an operation that reads on the host what a GPU has on
the device would find it there. Here each input of a compiled operation that a GPU has in its own
memory, as the operation's kernel for GPUs is registered, is copied to pages that only kernels, and
the driver's copies, can touch. Whatever else does is a segmentation fault.
"""

from __future__ import annotations

import contextlib
import inspect
import mmap
import os
import threading
import weakref
from collections.abc import Collection, Iterator
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.experimental.dlpack import from_dlpack
from tensorflow.python.framework import kernels, op_def_registry

from collective.ops import native_library
from collective.ops.rows import memory
from tests.gpu_double.reserved import allow

# Has tests of compiled operations hide their inputs.
WANTED = "COLLECTIVE_TEST_HIDDEN"
_OPEN = mmap.PROT_READ | mmap.PROT_WRITE

_lock = threading.RLock()


class _Region(memory.Region):
    """Is unmapped while nobody changes who may touch it: a weak set has it until then."""

    def __del__(self) -> None:
        with _lock:
            super().__del__()
            self._owned = False

    def allow(self, accesses: int) -> None:
        if self._owned:
            allow(self.address, self.size, accesses)


_regions: weakref.WeakSet[_Region] = weakref.WeakSet()
_entered = 0  # how often the device is at work


def wanted() -> bool:
    return os.environ.get(WANTED, "") not in ("", "0")


@contextlib.contextmanager
def on_device() -> Iterator[None]:
    """Lets all that is hidden be touched inside."""
    global _entered
    with _lock:
        _entered += 1
        try:
            _protect(_OPEN)
            yield
        finally:
            _entered -= 1
            _protect(_OPEN if _entered else 0)


def _protect(accesses: int) -> None:
    for region in _regions:
        region.allow(accesses)


def hide(values: np.ndarray) -> np.ndarray:
    """Returns a copy that the host can't touch."""
    region = _Region(values.nbytes)
    copy = region.view(*values.shape, dtype=values.dtype)
    copy[...] = values
    with _lock:
        _regions.add(region)
        region.allow(_OPEN if _entered else 0)
    return copy


def use(forgotten: Collection[str] = ()) -> None:
    """Hides inputs of the compiled operations that launch kernels, from now on in this process.

    Args:
        forgotten: inputs that are hidden although the host may read them.
    """
    library = _Hiding(native_library.library(), forgotten)
    native_library.library = lambda: library


class _Hiding:
    """Offers the functions that make operations of a library."""

    def __init__(self, library: Any, forgotten: Collection[str]):
        self._library, self._forgotten = library, forgotten

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self._library, name)
        operation = "".join(word.capitalize() for word in name.split("_"))

        def make(*arguments: Any, **attributes: Any) -> Any:
            if operation not in tf.get_default_graph()._op_to_kernel_label_map:
                return function(*arguments, **attributes)
            given = inspect.signature(function).bind(*arguments, **attributes)
            for argument in _on_device(operation) | {*self._forgotten} & {*given.arguments}:
                given.arguments[argument] = tf.nest.map_structure(
                    _hidden, given.arguments[argument]
                )
            return function(*given.args, **given.kwargs)

        return make


def _on_device(operation: str) -> set[str]:
    """Returns the inputs that are in a GPU's memory."""
    registered = kernels.get_registered_kernels_for_op(operation).kernel
    on_host = {
        name
        for kernel in registered
        if kernel.device_type == "GPU"
        for name in kernel.host_memory_arg
    }
    inputs = op_def_registry.get(operation).input_arg
    return {argument.name for argument in inputs} - on_host


@tf.custom_gradient
def _hidden(tensor: Any) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    tensor = tf.convert_to_tensor(tensor)
    made = tf.py_function(_share, [tensor], tensor.dtype)
    made.set_shape(tensor.shape)
    return made, lambda gradient: gradient


def _share(tensor: Any) -> Any:
    """Has TensorFlow take over a hidden copy, in place."""
    if tensor.shape.num_elements() == 0:
        return tensor
    with on_device():  # It may be hidden already.
        copy = hide(tensor.numpy())
    return from_dlpack(copy.__dlpack__())
