"""Runs kernels: whatever launches them is given a `Device`.

A GPU is a `collective.ops.gpu.cupy_device.CupyDevice`; a double with NumPy arrays stands in for it
in tests.
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
        handle: by which CUDA's driver launches it.
    """

    @property
    def handle(self) -> int: ...

    def __call__(
        self, blocks: int, threads: int, arguments: Sequence[Any], shared: int = 0
    ) -> None:
        """Puts it on the current stream; nothing happens for 0 `blocks`.

        Args:
            blocks, threads: of the grid, and of each block.
            arguments: arrays of the device, NumPy scalars of exactly the parameter's type.
            shared: bytes of dynamic shared memory.
        """


class Timed(NamedTuple):
    """Says how long work takes on a device.

    Attributes:
        ms: milliseconds.
        idle: the device had done all that was launched while the host was still launching: the
            host's time is among them.
    """

    ms: float
    idle: bool


class Device(abc.ABC):
    """Runs kernels in the order in which they are launched.

    Attributes:
        xp: the array module: `cupy` or what has the same functions.
        name: what to call it in a report.
        multiprocessors: how many there are.
    """

    xp: Any
    name: str
    multiprocessors: int

    def __init__(self) -> None:
        self._kernels: dict[tuple[str, str], Kernel] = {}

    def kernel(self, source: Source, name: str) -> Kernel:
        """Returns the kernel `name` of `source`, compiled when it is first asked for."""
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
        """Compiles what `kernel` returns."""

    @abc.abstractmethod
    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """Makes an array that isn't filled. It begins at a multiple of 256 bytes.

        Raises:
            MemoryError: the device has not so much.
        """

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """Makes an array of zeros."""
        array = self.empty(shape, dtype)
        array.fill(0)
        return array

    @abc.abstractmethod
    def upload(self, values: np.ndarray, into: Any) -> None:
        """Copies a NumPy array into one of the device of the same shape and type. The host does not
        wait.
        """

    @abc.abstractmethod
    def download(self, array: Any) -> np.ndarray:
        """Returns a NumPy copy of an array of the device. The host waits for all that was launched
        before.
        """

    @abc.abstractmethod
    def pointer(self, array: Any) -> int:
        """Returns the address of an array's first element."""

    @abc.abstractmethod
    def at(self, address: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> Any:
        """Makes an array at an address, in memory that is there as long as `owner` is; at any
        address, if it is empty.
        """

    @abc.abstractmethod
    def reserve(self, size: int) -> Any:
        """Reserves address space for memory that grows where it is, to `size` bytes at the most: a
        `collective.ops.gpu.reserved_memory.Reserved`.
        """

    def within(self, reserved: Any, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> Any:
        """Makes an array in reserved memory, from the byte `offset` on. Memory that isn't taken may
        not be touched.
        """
        return self.at(reserved.address + offset, shape, dtype, reserved)

    @abc.abstractmethod
    def trim(self) -> None:
        """Gives memory back that arrays have had and none has now."""

    @abc.abstractmethod
    def rows_that_fit(self, row_bytes: int, most: int) -> int:
        """Says how many rows to reserve for a column whose rows take `row_bytes`: see
        `collective.ops.rows.memory`.
        """

    @abc.abstractmethod
    def on_stream(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """Makes another stream, which somebody else has made, the current one of this thread."""

    @abc.abstractmethod
    def stream(self) -> int:
        """Returns the number of the current stream, which orders kernels, copies and memory."""

    @abc.abstractmethod
    def timed(self, work: Callable[[], object], waits: bool = False) -> Timed:
        """Times what `work` launches: on the device, not the host, and with nothing of it in the
        caches.

        Args:
            work: what to time. It is run again where the device did not have enough to do
                meanwhile.
            waits: the host waits for the device within `work`: it is run once, and is not `idle`
                for that.
        """

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Waits for all that was launched."""

    @abc.abstractmethod
    def versions(self) -> dict[str, str]:
        """Returns the names and versions of what runs the kernels, for a report."""


class OneStream:
    """Guards memory that is used again and again by one stream, which alone orders who writes to it
    and who reads.

    Args:
        name: of whose memory it is.
        device: where it is.
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
