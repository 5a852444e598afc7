"""Keeps arrays that are reused in every step."""

from __future__ import annotations

from typing import Any, Callable, TypeVar

import numpy as np

from collective.ops.gpu.device import Device, OneStream

T = TypeVar("T")


class Workspace:
    """Keeps the arrays to which functions write, by name, for the next call: results and scratch
    memory.

    So nothing is allocated once the largest batch has been seen. A function's result is valid until
    the same function is called with the same workspace again; give each group of lookups its own
    workspace.

    Taking or uploading on another stream than the first time is a RuntimeError: the new call would
    overwrite data that kernels of the previous call still read.

    Args:
        device: where the arrays are.
    """

    def __init__(self, device: Device):
        self.device = device
        self._one_stream = OneStream("a workspace", device)
        self._arrays: dict[str, Any] = {}
        self._uploaded: dict[str, tuple[np.ndarray, Any]] = {}
        self._kept: dict[str, Any] = {}

    @property
    def nbytes(self) -> int:
        """Counts the bytes of the device's memory that it holds."""
        arrays = [*self._arrays.values(), *(array for _, array in self._uploaded.values())]
        return sum(int(array.nbytes) for array in arrays)

    def take(self, name: str, size: int, dtype: Any) -> Any:
        """Returns `size` elements in one dimension. They hold what the last call left, or undefined
        values if the array had to grow.

        Raises:
            MemoryError: it can't grow; names the array and its bytes.
        """
        self._one_stream.check()
        array = self._arrays.get(name)
        if array is None or array.size < size or array.dtype != dtype:
            # A quarter more, so that batches of slowly growing sizes don't allocate each time.
            room = size if array is None else size + size // 4
            del array
            self._arrays.pop(name, None)
            try:
                self._arrays[name] = self.device.empty(max(room, 1), dtype)
            except MemoryError as error:
                raise MemoryError(
                    f"{name} needs {room * np.dtype(dtype).itemsize:,} bytes: {error}"
                ) from error
        return self._arrays[name][:size]

    def upload(self, name: str, values: np.ndarray) -> Any:
        """Returns `values` on the device. An array that equals that of the last call isn't copied
        again.
        """
        self._one_stream.check()
        known = self._uploaded.get(name)
        if (
            known is not None
            and known[0].dtype == values.dtype
            and np.array_equal(known[0], values)
        ):
            return known[1]
        if known is not None and known[0].shape == values.shape and known[0].dtype == values.dtype:
            array = known[1]
        else:
            array = self.device.empty(values.shape, values.dtype)
        values = values.copy()
        self.device.upload(values, array)
        self._uploaded[name] = values, array
        return array

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """Returns the result of `make` when `name` was first requested."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]
