"""Runs kernels: all code that launches them takes a `Device`.

A GPU is a `collective.ops.gpu.cupy_device.CupyDevice`; tests replace it with a double that has
NumPy arrays.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Protocol

import numpy as np

from collective.ops.gpu.sources import Source


class Kernel(Protocol):
    """Launches a compiled kernel.

    Attributes:
        handle: the handle by which CUDA's driver launches it.
    """

    @property
    def handle(self) -> int: ...

    def __call__(
        self, blocks: int, threads: int, arguments: Sequence[Any], shared: int = 0
    ) -> None:
        """Puts it on the current stream; does nothing for 0 `blocks`.

        Args:
            blocks, threads: the sizes of the grid and of each block.
            arguments: arrays of the device, or NumPy scalars of exactly the parameter's type.
            shared: bytes of dynamic shared memory.
        """


class Timed(NamedTuple):
    """Says how long work takes on a device.

    Attributes:
        ms: milliseconds.
        idle: whether the device had finished while the host was still launching: then `ms`
            includes the host's time.
    """

    ms: float
    idle: bool


class Device(abc.ABC):
    """Runs kernels in the order in which they are launched.

    Attributes:
        xp: the array module: `cupy` or what has the same functions.
        name: its name in a report.
        multiprocessors: how many it has.
    """

    xp: Any
    name: str
    multiprocessors: int

    def __init__(self) -> None:
        self._kernels: dict[tuple[str, str], Kernel] = {}

    def kernel(self, source: Source, name: str) -> Kernel:
        """Returns the kernel `name` of `source`, compiled when it is first requested."""
        key = source.file, name
        if key not in self._kernels:
            if name not in source.kernels:
                raise ValueError(
                    f"{source.file} has the kernels {', '.join(source.kernels)}, not {name}"
                )
            self._kernels[key] = self._load(source, name)
        return self._kernels[key]

    @abc.abstractmethod
    def _load(self, source: Source, name: str) -> Kernel:
        """Compiles the kernel for `kernel`."""

    @abc.abstractmethod
    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """Makes an uninitialised array. It begins at a multiple of 256 bytes.

        Raises:
            MemoryError: the device doesn't have that much memory.
        """

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """Makes an array of zeros."""
        array = self.empty(shape, dtype)
        array.fill(0)
        return array

    @abc.abstractmethod
    def upload(self, values: np.ndarray, into: Any) -> None:
        """Copies a NumPy array into a device array of the same shape and type. The host does not
        wait.
        """

    @abc.abstractmethod
    def download(self, array: Any) -> np.ndarray:
        """Returns a NumPy copy of a device array. The host waits for everything that was launched
        before.
        """

    @abc.abstractmethod
    def pointer(self, array: Any) -> int:
        """Returns the address of an array's first element."""

    @abc.abstractmethod
    def at(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        """Makes an array at an address, in memory that exists as long as `owner` does; at any
        address if it is empty.
        """

    @abc.abstractmethod
    def reserve(self, size: int) -> Any:
        """Reserves address space for memory that grows in place, up to `size` bytes: a
        `collective.ops.gpu.reserved_memory.Reserved`.
        """

    def within(self, reserved: Any, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> Any:
        """Makes an array in reserved memory, from the byte `offset` on. Memory that isn't taken
        may not be touched.
        """
        return self.at(reserved.address + offset, shape, dtype, reserved)

    @abc.abstractmethod
    def trim(self) -> None:
        """Releases memory that arrays have had and that none has now."""

    @abc.abstractmethod
    def rows_that_fit(self, row_bytes: int, most: int) -> int:
        """Says how many rows to reserve for a column whose rows take `row_bytes`: see
        `collective.ops.rows.memory`.
        """

    @abc.abstractmethod
    def on_stream(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """Makes another stream, which other code has made, the current one of this thread."""

    @abc.abstractmethod
    def stream(self) -> int:
        """Returns the number of the current stream, which orders kernels, copies and memory."""

    @abc.abstractmethod
    def timed(self, work: Callable[[], object], waits: bool = False) -> Timed:
        """Times what `work` launches: on the device, not the host, and with none of its data in the
        caches.

        Args:
            work: what to time. It runs again if the device did not have enough to do at the same
                time.
            waits: whether the host waits for the device within `work`: then it runs once, and is
                not `idle` for that.
        """

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Waits for everything that was launched."""

    @abc.abstractmethod
    def versions(self) -> dict[str, str]:
        """Returns the names and versions of what runs the kernels, for a report."""


class OneStream:
    """Guards memory that one stream uses again and again: only that stream orders its writes and
    reads.

    Args:
        name: the owner of the memory.
        device: the device with the memory.
    """

    def __init__(self, name: str, device: Device):
        self._name, self._device = name, device
        self._stream: int | None = None

    def check(self) -> None:
        """Checks the current stream; to be called before each use.

        Raises:
            RuntimeError: the current stream isn't that of the first use.
        """
        now = self._device.stream()
        if self._stream is None:
            self._stream = now
        if self._stream != now:
            raise RuntimeError(
                f"{self._name} was first used on stream {self._stream:#x} and now is on stream "
                f"{now:#x}, which does not wait for what the other does with its memory: use it on "
                "one stream only"
            )
