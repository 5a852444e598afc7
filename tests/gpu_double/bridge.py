"""Shares the host's memory between TensorFlow and NumPy, as a GPU's is shared."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from collective.ops import memory
from collective.ops.gpu.memory_bridge import DlpackExporter, MemoryBridge
from collective.ops.gpu.sources import Source
from tests.gpu_double.driver import installed
from tests.gpu_double.kernels import NumpyKernels
from tests.gpu_double.launched import KERNELS
from tests.gpu_double.reserved import Reserved


@functools.cache
def _handle(name: str) -> int:
    return installed().register(name, KERNELS[name])


class HostBridge(MemoryBridge):
    """Shares the memory of tensors on the CPU with NumPy's references."""

    placed, kind, label = None, "", "emulated"

    def __init__(self) -> None:
        super().__init__()
        self.kernels = NumpyKernels()

    def handle(self, source: Source, name: str) -> int:
        return _handle(name)

    def memory(self) -> str:
        return "NumPy takes the host's memory"

    def finish(self) -> None:
        pass

    def reserve(self, size: int) -> Reserved:
        return Reserved(size)

    def rows_that_fit(self, row_bytes: int, most: int) -> int:
        return memory.rows_that_fit(row_bytes, most)

    def at(self, address: int, shape: tuple[int, ...], dtype: np.dtype, owner: Any) -> Any:
        return memory.array_at(address, shape, dtype, owner)

    def shared(self, tensor: Any) -> Any:
        if 0 in tensor.shape:
            return np.zeros(tuple(tensor.shape), tensor.dtype.as_numpy_dtype)
        array = np.from_dlpack(DlpackExporter(tensor, (1, 0)))  # NumPy may only read it
        return self.at(array.ctypes.data, array.shape, array.dtype, array)
