"""Shares the host's memory between TensorFlow and NumPy, as a GPU's is shared."""

from __future__ import annotations

from typing import Any

import numpy as np

from collective.ops import memory
from collective.ops.gpu.memory_bridge import DlpackExporter, MemoryBridge
from tests.gpu_double.kernels import NumpyKernels
from tests.gpu_double.reserved import Reserved


class HostBridge(MemoryBridge):
    """Shares the memory of tensors on the CPU with NumPy's references."""

    placed, kind = None, ""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = NumpyKernels()

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
