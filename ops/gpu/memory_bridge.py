"""Shares a GPU's memory and TensorFlow's stream with Python, for the keys and rows of dynamic
tables; gives kernels to compiled operations.

*Order.* TensorFlow launches all kernels of a GPU on one stream, and so does Python. Kernels on one
stream run in order and need no wait. Memory needs none either: each allocator reuses it in the
order of the stream. The host waits for data that it reads, and before memory is unmapped.

*Memory.* Kernels read and write TensorFlow's tensors in place. CuPy has the hash tables, and the
memory that kernels need to find keys. TensorFlow makes one allocator per GPU and process, with the
limit of the first use of the GPU: for a session `kernel_device.TENSORFLOW_SHARE`, for eager
operations no limit. CuPy and the rows of dynamic tables take, as they grow, memory that TensorFlow
has not taken.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from collective.ops import kernel_device, native_library
from collective.ops.communication import collectives
from collective.ops.gpu.cupy_device import CupyDevice, kept_locale
from collective.ops.gpu.kernel_api import Kernels
from collective.ops.gpu.sources import Source
from collective.ops.gpu.workspace import Workspace
from collective.tensorflow_internals.graphs import context


class AdvisedMemoryError(MemoryError):
    """Says that memory is short, and what to do; it needs no further `MemoryBridge.advice`."""


class MemoryBridge(abc.ABC):
    """Shares memory between TensorFlow and the kernels of one device.

    Attributes:
        placed: the device of the kernels' operations, as for `tf.device`.
        kind: the type of that device, '' for any.
        label: selects, of the kernels that TensorFlow knows for compiled operations, those that
            launch kernels; '' if there is only one.
        kernels: one object for all calls, with its own memory.
    """

    placed: str | None
    kind: str
    label: str
    kernels: Kernels

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def hand_over(self, source: Source) -> None:
        """Gives the kernels of `source` to the compiled operations, which launch some of them."""
        functions = native_library.functions()
        take = functions.collective_gpu_kernel
        take.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
        for name in source.kernels:
            take(name.encode(), self.handle(source, name))

    @abc.abstractmethod
    def handle(self, source: Source, name: str) -> int:
        """Returns the handle by which the driver launches the kernel `name` of `source`, which
        stays loaded.
        """

    @abc.abstractmethod
    def at(self, address: int, shape: tuple[int, ...], dtype: np.dtype, owner: Any) -> Any:
        """Makes an array at an address, in memory that exists as long as `owner` does; at any
        address if it is empty.
        """

    @abc.abstractmethod
    def memory(self) -> str:
        """Says how much memory the kernels take, for a report."""

    def advice(self) -> str:
        """Says what to do if memory is short."""
        return f"{self.memory()}. Use smaller batches, or more ranks"

    @contextlib.contextmanager
    def call(self, stream: int | None = None) -> Iterator[None]:
        """Encloses what Python does at one time. A nested call is a part of the outer one.

        Args:
            stream: the stream that orders it; None: TensorFlow's.
        """
        with self._lock:
            yield

    # ---- memory that grows in place, as in `Device`

    @abc.abstractmethod
    def reserve(self, size: int) -> Any: ...

    def grow(self, reserved: Any, size: int) -> None:
        reserved.grow(size)

    def shrink(self, reserved: Any, size: int) -> None:
        reserved.shrink(size)

    def within(self, reserved: Any, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> Any:
        return self.at(reserved.address + offset, shape, dtype, reserved)

    @abc.abstractmethod
    def rows_that_fit(self, row_bytes: int, most: int) -> int: ...


class GpuBridge(MemoryBridge):
    """Shares the memory of the GPU that this process sees, by CuPy.

    Raises:
        RuntimeError: CuPy can't use the GPU, or there are several; says why.
    """

    placed, kind, label = "/gpu:0", "GPU", ""

    def __init__(self) -> None:
        gpus = tf.config.list_physical_devices("GPU")
        if len(gpus) > 1 and collectives.size() > 1:
            raise RuntimeError(
                f"this rank sees {len(gpus)} GPUs, and kernels and TensorFlow might use different "
                "ones: start ranks with collective launch, or set "
                "CUDA_VISIBLE_DEVICES to one GPU for each"
            )
        grows = kernel_device.let_memory_grow()
        self._begin(CupyDevice(), grows)

    def _begin(self, device: Any, grows: bool = True) -> None:
        super().__init__()
        self.device = device
        self._grows = grows
        self.kernels = Kernels(Workspace(device))

    def handle(self, source: Source, name: str) -> int:
        with kept_locale():
            return self.device.kernel(source, name).handle

    def memory(self) -> str:
        if self._grows:
            return self.device.memory()
        return (
            f"{self.device.memory()}; TensorFlow has taken nearly all that was free, since "
            "something ran eagerly on the GPU before scope(): run it inside, in "
            "tf.device('/cpu:0'), or after "
            "tf.config.experimental.set_memory_growth(gpu, True)"
        )

    def advice(self) -> str:
        return (
            f"{super().advice()}; or leave dynamic tables more of the GPU's memory: TensorFlow "
            f"takes less of it with config.{kernel_device.SHARE_OPTION} of the session"
        )

    def at(self, address: int, shape: tuple[int, ...], dtype: np.dtype, owner: Any) -> Any:
        return self.device.at(address, shape, dtype, owner)

    @functools.cached_property
    def _stream(self) -> int:
        """Returns TensorFlow's stream."""
        with context.eager_mode(), tf.device(self.placed):
            native_library.library().collective_stream()
        find = native_library.functions().collective_gpu_stream
        find.restype = ctypes.c_void_p
        return find() or 0

    @contextlib.contextmanager
    def call(self, stream: int | None = None) -> Iterator[None]:
        with super().call(), kept_locale():
            with self.device.on_stream(self._stream if stream is None else stream):
                yield

    def reserve(self, size: int) -> Any:
        return self.device.reserve(size)

    def grow(self, reserved: Any, size: int) -> None:
        try:
            reserved.grow(size)
        except MemoryError:
            self.device.trim()
            reserved.grow(size)

    def rows_that_fit(self, row_bytes: int, most: int) -> int:
        return self.device.rows_that_fit(row_bytes, most)
