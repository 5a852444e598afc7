"""Shares memory between arrays of kernels and tensors of TensorFlow, and orders the work of the
two, where Python launches kernels; hands them over to compiled operations, which do without it.

*Memory.* TensorFlow owns all that it sees: kernels read inputs where they are, and write results
into tensors that TensorFlow has allocated, which are shared through DLPack. CuPy owns what kernels
need meanwhile, and TensorFlow never sees it. So no memory changes hands, and each allocator reuses
only what its own streams have done with.

*Order.* TensorFlow's kernels run on streams of its own, CuPy's on CuPy's. To share a tensor through
DLPack, TensorFlow makes the host wait until the GPU has done all that TensorFlow launched so far
(`TFE_TensorHandleDevicePointer` synchronizes its device): nothing still reads the memory that a
result gets now. Inputs may be hundreds, so one compiled operation (`CollectiveAddresses`) tells
where all of them are, and waits in the same way once. Before TensorFlow goes on with a result, the
host waits for CuPy's stream. So work that depends on other work never runs beside it; other work
may. It costs a wait of the host for each call and each result, short ones after the first, and the
GPU idles meanwhile.

*Room.* TensorFlow makes one allocator for a GPU in each process, by the limit that whoever uses the
GPU first has: a session's is `placement.memory_shares()[1]`, eager operations have none. CuPy's
pool has a limit of its own, and takes memory as it needs it. So kernels find the memory that is
theirs if the first user is a session.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from collective.ops import collectives, native_library, placement
from collective.ops.gpu.cupy_device import CupyDevice, kept_locale
from collective.ops.gpu.device import Device
from collective.ops.gpu.kernel_api import Joined, Kernels
from collective.ops.gpu.sources import Source
from collective.ops.gpu.workspace import Workspace

# The arrays of a workspace that are results, which kernels write into TensorFlow's memory.
RESULTS = frozenset({"pool", "sum_rows"})


class MemoryBridge(abc.ABC):
    """Shares memory between TensorFlow and the kernels of one device.

    Attributes:
        placed: the device of the kernels' operations, as `tf.device` takes it.
        kind: the type of that device, '' for any.
        label: which of the kernels that TensorFlow knows for compiled operations launch kernels, ''
            where that is the only one.
        kernels: one object for all calls, which has memory of its own.
    """

    placed: str | None
    kind: str
    label: str
    kernels: Kernels

    def __init__(self) -> None:
        self._lock, self._depth = threading.RLock(), 0

    def hand_over(self, source: Source) -> None:
        """Hands the kernels of `source` to the compiled operations, which launch some of them."""
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

    def given(self, tensors: Sequence[Any], dtypes: Sequence[np.dtype]) -> list[Any]:
        """Makes arrays of these types in the memory of eager tensors, once TensorFlow has done all
        that it was to do with them. Of more than two dimensions all but the first become one.

        Raises:
            RuntimeError: TensorFlow has the tensors on another device.
        """
        # nobody keeps a copy, so its address would be worth nothing
        if self.kind not in tensors[0].backing_device:
            raise RuntimeError(
                f"kernels are on a {self.kind}, but are given tensors on "
                f"{tensors[0].backing_device}: switch allow_soft_placement off, or set "
                f"{placement.CHOICE}=cpu"
            )
        with tf.device(self.placed):
            addresses = native_library.library().collective_addresses(tensors)
        described = addresses.numpy().view(np.int64).tolist()
        return [
            self.at(address, (first, others)[:rank], dtype, tensor)
            for (address, rank, first, others), dtype, tensor in zip(described, dtypes, tensors)
        ]

    @abc.abstractmethod
    def at(self, address: int, shape: tuple[int, ...], dtype: np.dtype, owner: Any) -> Any:
        """Makes an array at an address, in memory that is there as long as `owner` is; at any
        address, if it is empty.
        """

    @abc.abstractmethod
    def shared(self, tensor: Any) -> Any:
        """Makes an array in the memory of an eager tensor, once TensorFlow has done all that it was
        to do with it.
        """

    @abc.abstractmethod
    def memory(self) -> str:
        """Says how much memory kernels take, for a report."""

    def advice(self) -> str:
        """Says what to do where memory is short."""
        return f"{self.memory()}. Use smaller batches, or more ranks"

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Encloses all that one call does. A call within a call is a part of it."""
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
        """Ends a call, also behind an error: kernels that were launched still read and write
        TensorFlow's memory.
        """

    # ---- memory that grows where it is, as `Device` has it

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

    # ---- results

    def results(self, arrays: Sequence[Joined | Any]) -> list[Any]:
        """Makes complete eager tensors of what `arrays` hold."""
        made = [self.copied(one.array if isinstance(one, Joined) else one) for one in arrays]
        return self.split(arrays, made)

    def split(self, arrays: Sequence[Joined | Any], made: Sequence[Any]) -> list[Any]:
        """Cuts the tensors `made` of several results into their parts."""
        out: list[Any] = []
        for array, tensor in zip(arrays, made):
            if not isinstance(array, Joined):
                out.append(tensor)
                continue
            if not array.sizes:
                continue
            with tf.device("/cpu:0"):
                sizes = tf.constant(array.sizes, tf.int64)
            count = len(array.sizes)
            with tf.device(self.placed):
                out += native_library.library().collective_parts(
                    tensor, sizes, N=count, dims=array.dims or [0] * count
                )
        return out

    def allocated(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Makes an eager tensor that isn't filled."""
        with tf.device(self.placed):
            size = np.array(shape, np.int32)
            if dtype != np.uint32:
                return tf.raw_ops.Empty(shape=size, dtype=dtype)
            # TensorFlow has no Empty of uint32 on GPUs
            return tf.bitcast(tf.raw_ops.Empty(shape=size, dtype=np.float32), np.uint32)

    def copied(self, array: Any) -> Any:
        """Makes an eager tensor with what `array` holds."""
        array = array.view(np.uint32) if array.dtype == np.int32 else array
        tensor = self.allocated(tuple(array.shape), np.dtype(array.dtype))
        if array.size:
            self.shared(tensor)[...] = array
        return tensor


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
                f"this rank sees {len(gpus)} GPUs, of which kernels and TensorFlow might take "
                "different ones: start ranks with python -m collective.launch, or set "
                "CUDA_VISIBLE_DEVICES to one GPU for each"
            )
        has_limit = _grows(gpus)
        device = CupyDevice()
        device.limit(placement.memory_shares()[0])
        self._begin(device, has_limit)

    def _begin(self, device: Any, has_limit: bool = True) -> None:
        super().__init__()
        self.device = device
        self._has_limit = has_limit
        self._lent: dict[int, Any] = {}  # tensors that kernels write to, by address
        self.kernels = Kernels(_LendingWorkspace(device, self))

    def handle(self, source: Source, name: str) -> int:
        with kept_locale():
            return self.device.kernel(source, name).handle

    def memory(self) -> str:
        if self._has_limit:
            return self.device.memory()
        return (
            f"{self.device.memory()}; TensorFlow may take all that is free, since something ran "
            "eagerly on the GPU before the first lookup was made and a session set its limit, "
            f"{100 * placement.memory_shares()[1]:.0f} %: run it behind them, or in "
            "tf.device('/cpu:0')"
        )

    def advice(self) -> str:
        return (
            f"{super().advice()}; or share the GPU's memory between kernels and TensorFlow, which "
            f"has the tables, in another way: {placement.WORKSPACE}"
        )

    def at(self, address: int, shape: tuple[int, ...], dtype: np.dtype, owner: Any) -> Any:
        return self.device.at(address, shape, dtype, owner)

    def shared(self, tensor: Any) -> Any:
        xp = self.device.xp
        if 0 in tensor.shape:
            return xp.zeros(tuple(tensor.shape), tensor.dtype.as_numpy_dtype)
        return xp.from_dlpack(DlpackExporter(tensor, (2, xp.cuda.runtime.getDevice())))

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
        """Makes an array for a result, in TensorFlow's memory."""
        tensor = self.allocated((size,), dtype)
        array = self.shared(tensor)
        self._lent[self.device.pointer(array)] = tensor
        return array

    def results(self, arrays: Sequence[Joined | Any]) -> list[Any]:
        whole = [one.array if isinstance(one, Joined) else one for one in arrays]
        copies = [self.copied(array) if self._lender(array) is None else None for array in whole]
        self.device.synchronize()  # TensorFlow may copy parts
        made = [self._part(array) if copy is None else copy for array, copy in zip(whole, copies)]
        return self.split(arrays, made)

    def _lender(self, array: Any) -> tuple[Any, int] | None:
        """Finds the tensor that `array` is a part of, and where the array begins in it."""
        for address, tensor in self._lent.items():
            first = self.device.pointer(array) - address
            if array.size and 0 <= first < tensor.shape[0] * tensor.dtype.size:
                return tensor, first // tensor.dtype.size
        return None

    def _part(self, array: Any) -> Any:
        lender = self._lender(array)
        assert lender is not None
        tensor, first = lender
        if array.shape == tuple(tensor.shape):
            return tensor
        with tf.device(self.placed):
            return tf.reshape(tensor[first : first + array.size], array.shape)


def _grows(gpus: Sequence[Any]) -> bool:
    """Lets TensorFlow's memory grow; returns whether it may have a limit: that nothing has run
    eagerly yet.
    """
    try:
        for gpu in gpus[:1]:
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError:
        return False  # TensorFlow has the GPU already
    return True


class _LendingWorkspace(Workspace):
    """Has results lie in TensorFlow's memory."""

    def __init__(self, device: Device, bridge: GpuBridge):
        super().__init__(device)
        self._bridge = bridge

    def take(self, name: str, size: int, dtype: Any) -> Any:
        if name in RESULTS and size:
            return self._bridge.lend(size, np.dtype(dtype))
        return super().take(name, size, dtype)


class DlpackExporter:
    """Hands an eager tensor to `from_dlpack`.

    Args:
        tensor: the tensor.
        device: DLPack's type and number of its device.
    """

    def __init__(self, tensor: Any, device: tuple[int, int]):
        self._tensor, self._device = tensor, device

    def __dlpack__(self, **_: Any) -> Any:
        return tf.experimental.dlpack.to_dlpack(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device
