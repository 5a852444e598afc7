"""How arrays of kernels and tensors of TensorFlow share memory, and in which order the two work.

*Memory.* What TensorFlow sees is TensorFlow's: kernels read inputs where they are, and write
results into tensors that TensorFlow has allocated, which are shared through DLPack. What kernels
need meanwhile is CuPy's, and TensorFlow never sees it. So no memory changes hands, and each
allocator reuses only what its own streams have done with.

*Order.* TensorFlow's kernels run on streams of its own, CuPy's on CuPy's. To share a tensor through
DLPack, TensorFlow makes the host wait until the GPU has done all that TensorFlow launched so far
(`TFE_TensorHandleDevicePointer` synchronizes its device): whatever read the memory which a result
gets now. Inputs may be hundreds, so one compiled operation (`CollectiveAddresses`) tells where all
of them are, and waits in the same way once. Before TensorFlow goes on with a result, the host waits
for CuPy's stream. So what depends on each other never runs side by side; what doesn't may. It costs
a wait of the host for each call and each result, short ones after the first, and what the GPU idles
meanwhile.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from collective.ops import collectives, memory, native_library, placement
from collective.ops.gpu.cupy_device import CupyDevice, kept_locale
from collective.ops.gpu.device import Device
from collective.ops.gpu.functions import Functions, InNumPy, Joined, OnDevice
from collective.ops.gpu.workspace import Workspace

# Results that kernels write where TensorFlow has them.
LENT = frozenset({"gather.float32", "pool.float32", "sum_rows.float32"})


class Side(abc.ABC):
    """Where the binding computes.

    Attributes:
        placed: the device of its operations, as `tf.device` takes it.
        kind: the type of that device, '' for any.
        functions: the kernels, with memory of their own: one for all calls.
    """

    placed: str | None
    kind: str
    functions: Functions

    def __init__(self) -> None:
        self._lock, self._depth = threading.RLock(), 0

    def given(self, tensors: Sequence[Any], dtypes: Sequence[np.dtype]) -> list[Any]:
        """Arrays of these types in the memory of eager tensors; of more than two dimensions all but
        the first are one. TensorFlow has done all that it was to do with them.

        Raises:
            RuntimeError: TensorFlow has them elsewhere.
        """
        # of copies that nobody keeps an address is worth nothing
        if self.kind not in tensors[0].backing_device:
            raise RuntimeError(
                f"kernels are on a {self.kind}, but are given tensors on "
                f"{tensors[0].backing_device}: switch "
                f"allow_soft_placement off, or set {placement.CHOICE}=cpu"
            )
        with tf.device(self.placed):
            described = (
                native_library.library()
                .collective_addresses(tensors)
                .numpy()
                .view(np.int64)
                .tolist()
            )
        return [
            self.at(address, (first, others)[:rank], dtype, tensor)
            for (address, rank, first, others), dtype, tensor in zip(described, dtypes, tensors)
        ]

    @abc.abstractmethod
    def at(self, address: int, shape: tuple[int, ...], dtype: np.dtype, owner: Any) -> Any:
        """An array at an address, in memory that is there as long as `owner` is; at any address, if
        it is empty.
        """

    @abc.abstractmethod
    def shared(self, tensor: Any) -> Any:
        """An array in the memory of an eager tensor. TensorFlow has done all that it was to do with
        it.
        """

    @abc.abstractmethod
    def memory(self) -> str:
        """How much kernels take, for a report."""

    def advice(self) -> str:
        """What to do where memory is short."""
        return f"{self.memory()}. Use smaller batches, or more ranks"

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around all that one call does. A call within a call is a part of it."""
        with self._lock:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.finish()

    @abc.abstractmethod
    def finish(self) -> None:
        """At the end of a call, also behind an error: what was launched still reads and writes
        memory of TensorFlow's.
        """

    # Of memory that grows where it is, as `Device` has it.

    @abc.abstractmethod
    def reserve(self, size: int) -> Any: ...

    def grow(self, reserved: Any, size: int) -> None:
        reserved.grow(size)

    def within(self, reserved: Any, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> Any:
        return self.at(reserved.address + offset, shape, dtype, reserved)

    @abc.abstractmethod
    def rows_that_fit(self, row_bytes: int, most: int) -> int: ...

    def results(self, arrays: Sequence[Joined | Any]) -> list[Any]:
        """Eager tensors with what `arrays` hold, complete."""
        made = [self.copied(one.array if isinstance(one, Joined) else one) for one in arrays]
        return self.split(arrays, made)

    def split(self, arrays: Sequence[Joined | Any], made: Sequence[Any]) -> list[Any]:
        """The tensors `made`, or the parts of those that are of several."""
        out: list[Any] = []
        for array, tensor in zip(arrays, made):
            if not isinstance(array, Joined):
                out.append(tensor)
            elif array.sizes:
                with tf.device("/cpu:0"):
                    sizes = tf.constant(array.sizes, tf.int64)
                with tf.device(self.placed):
                    out += native_library.library().collective_parts(
                        tensor, sizes, N=len(array.sizes), dims=array.dims or [0] * len(array.sizes)
                    )
        return out

    def allocated(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An eager tensor that isn't filled."""
        with tf.device(self.placed):
            size = np.array(shape, np.int32)
            if dtype != np.uint32:
                return tf.raw_ops.Empty(shape=size, dtype=dtype)
            # there is no other on GPUs
            return tf.bitcast(tf.raw_ops.Empty(shape=size, dtype=np.float32), np.uint32)

    def copied(self, array: Any) -> Any:
        """An eager tensor with what `array` holds."""
        array = array.view(np.uint32) if array.dtype == np.int32 else array
        tensor = self.allocated(tuple(array.shape), np.dtype(array.dtype))
        if array.size:
            self.shared(tensor)[...] = array
        return tensor


class Gpu(Side):
    """The GPU that this process sees, by CuPy.

    Raises:
        RuntimeError: CuPy can't use it, or there are several; says why.
    """

    placed, kind = "/gpu:0", "GPU"

    def __init__(self) -> None:
        seen = tf.config.list_physical_devices("GPU")
        if len(seen) > 1 and collectives.size() > 1:
            raise RuntimeError(
                f"this rank sees {len(seen)} GPUs, of which kernels and TensorFlow "
                f"might take different ones: "
                "start ranks with python -m collective.launch, or set "
                "CUDA_VISIBLE_DEVICES to one GPU for each"
            )
        # TensorFlow has the GPU already, as its first session says
        with contextlib.suppress(RuntimeError):
            for gpu in seen[:1]:
                tf.config.experimental.set_memory_growth(gpu, True)
        device = CupyDevice()
        device.limit(placement.memory_shares()[0])
        self._begin(device)

    def _begin(self, device: Any) -> None:
        super().__init__()
        self.device = device
        self._lent: dict[int, Any] = {}  # by address, what kernels write to and TensorFlow has
        self.functions = OnDevice(_Lending(device, self))

    def memory(self) -> str:
        return self.device.memory()

    def advice(self) -> str:
        return (
            f"{super().advice()}; or share the GPU's memory between kernels and TensorFlow, "
            f"which has the tables, in "
            f"another way: {placement.WORKSPACE}"
        )

    def at(self, address: int, shape: tuple[int, ...], dtype: np.dtype, owner: Any) -> Any:
        return self.device.at(address, shape, dtype, owner)

    def shared(self, tensor: Any) -> Any:
        xp = self.device.xp
        if 0 in tensor.shape:
            return xp.zeros(tuple(tensor.shape), tensor.dtype.as_numpy_dtype)
        return xp.from_dlpack(_Exporter(tensor, (2, xp.cuda.runtime.getDevice())))

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        with super().call(), kept_locale():
            yield

    def finish(self) -> None:
        try:
            self.device.synchronize()
        finally:
            self._lent.clear()

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

    def lend(self, size: int, dtype: Any) -> Any:
        """An array in memory of TensorFlow's, for a result."""
        tensor = self.allocated((size,), dtype)
        array = self.shared(tensor)
        self._lent[self.device.pointer(array)] = tensor
        return array

    def results(self, arrays: Sequence[Joined | Any]) -> list[Any]:
        whole = [one.array if isinstance(one, Joined) else one for one in arrays]
        made = [self.copied(array) if self._of_lent(array) is None else None for array in whole]
        self.device.synchronize()  # TensorFlow may copy parts
        return self.split(
            arrays, [self._part(array) if one is None else one for array, one in zip(whole, made)]
        )

    def _of_lent(self, array: Any) -> tuple[Any, int] | None:
        """The tensor that `array` is a part of, and where it begins there."""
        for address, tensor in self._lent.items():
            first = self.device.pointer(array) - address
            if array.size and 0 <= first < tensor.shape[0] * tensor.dtype.size:
                return tensor, first // tensor.dtype.size
        return None

    def _part(self, array: Any) -> Any:
        found = self._of_lent(array)
        assert found is not None
        tensor, first = found
        if array.shape == tuple(tensor.shape):
            return tensor
        with tf.device(self.placed):
            return tf.reshape(tensor[first : first + array.size], array.shape)


class _Lending(Workspace):
    """Whose results lie in memory of TensorFlow's."""

    def __init__(self, device: Device, side: Gpu):
        super().__init__(device)
        self._side = side

    def take(self, name: str, size: int, dtype: Any) -> Any:
        return (
            self._side.lend(size, np.dtype(dtype))
            if name in LENT and size
            else super().take(name, size, dtype)
        )


class Double(Side):
    """The references in NumPy, on the CPU: a double of the GPU for tests. Memory is shared in the
    same way.
    """

    placed, kind = None, ""

    def __init__(self) -> None:
        super().__init__()
        self.functions = InNumPy()

    def memory(self) -> str:
        return "NumPy takes the host's memory"

    def finish(self) -> None:
        pass

    def reserve(self, size: int) -> Any:
        return memory.Reserved(size)

    def rows_that_fit(self, row_bytes: int, most: int) -> int:
        return memory.rows_that_fit(row_bytes, most)

    def at(self, address: int, shape: tuple[int, ...], dtype: np.dtype, owner: Any) -> Any:
        return memory.array_at(address, shape, dtype, owner)

    def shared(self, tensor: Any) -> Any:
        if 0 in tensor.shape:
            return np.zeros(tuple(tensor.shape), tensor.dtype.as_numpy_dtype)
        array = np.from_dlpack(_Exporter(tensor, (1, 0)))  # NumPy may only read it
        return self.at(array.ctypes.data, array.shape, array.dtype, array)


class _Exporter:
    """An eager tensor, as `from_dlpack` takes it."""

    def __init__(self, tensor: Any, device: tuple[int, int]):
        self._tensor, self._device = tensor, device

    def __dlpack__(self, **_: Any) -> Any:
        return tf.experimental.dlpack.to_dlpack(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device
