"""Finds NCCL's functions, and opens them for the collectives of the carrier `nccl`.

The compiled operations (`ops/native/gpu/nccl_carrier.cc`) call NCCL through a table of functions.
So they are built without NCCL, and a test can put its own functions there.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import native_library, newer_gpus

# The fields of the table, and their names in NCCL and in CUDA's driver.
_NCCL = {
    "get_unique_id": "ncclGetUniqueId",
    "comm_init_rank": "ncclCommInitRank",
    "comm_abort": "ncclCommAbort",
    "comm_get_async_error": "ncclCommGetAsyncError",
    "group_start": "ncclGroupStart",
    "group_end": "ncclGroupEnd",
    "send": "ncclSend",
    "recv": "ncclRecv",
    "all_reduce": "ncclAllReduce",
    "broadcast": "ncclBroadcast",
    "get_error_string": "ncclGetErrorString",
}
_NEWER = {"get_last_error": "ncclGetLastError"}  # since NCCL 2.13
_DRIVER = {"stream_context": "cuStreamGetCtx", "set_context": "cuCtxSetCurrent"}


class Functions(ctypes.Structure):
    """Holds the addresses of functions, like `nccl::Functions` in ops/native/gpu."""

    _fields_ = [(field, ctypes.c_void_p) for field in (*_NCCL, *_NEWER, *_DRIVER)]


@dataclasses.dataclass
class _Library:
    """Holds the functions that stand in for NCCL's, if any, and whether the library is open."""

    injected: Functions | None = None
    is_open: bool = False


_nccl = _Library()


def use(functions: Functions | None) -> None:
    """Injects functions that move the host's memory, before the first collective; None: NCCL's."""
    _nccl.injected = functions


def moves_host_memory() -> bool:
    """Tells whether collectives move host memory, by injected functions."""
    return _nccl.injected is not None


def problem() -> str | None:
    """Returns why this process can't use NCCL, and what helps; None if it can."""
    reason = native_library.missing()
    if reason is not None:
        return f"the compiled operations are missing: {reason}"
    if _nccl.injected is not None:
        return None
    if not tf.config.list_physical_devices("GPU"):
        return (
            "NCCL moves the memory of GPUs, and TensorFlow sees none: look at nvidia-smi, "
            "CUDA_VISIBLE_DEVICES and tf.config.list_physical_devices(), or leave the choice to "
            "COLLECTIVE_CARRIER=auto"
        )
    try:
        _of_nccl()
    except OSError as error:
        return (
            f"there is no NCCL ({error}): `pip install nvidia-nccl-cu12`, or `python -m "
            "cupyx.tools.install_library --library nccl --cuda 12.x` next to CuPy, installs it"
        )
    except AttributeError as error:
        return f"NCCL 2.7 or newer is needed, which has what this one lacks: {error}"
    return None


def start(rank: int, ranks: int) -> str | None:
    """Opens NCCL for this process, once; returns why it can't.

    The first collective makes the communicator; the end of the process aborts it.

    Args:
        rank: its number among the ranks that exchange by NCCL; all share memory for headers.
        ranks: how many ranks these are.
    """
    library = native_library.functions()
    library.collective_nccl_open.restype = ctypes.c_char_p
    functions, on_host = (_of_nccl(), 0) if _nccl.injected is None else (_nccl.injected, 1)
    said = library.collective_nccl_open(ctypes.byref(functions), on_host, rank, ranks).decode()
    if said:
        return f"rank {rank} can't use NCCL: {said}"
    if not _nccl.is_open:
        _nccl.is_open = True
        atexit.register(library.collective_nccl_leave)
        library.collective_nccl_problem.restype = ctypes.c_char_p
    return None


def checked(values: Any) -> Any:
    """Returns the values of a run, unless NCCL's communicator has been aborted.

    Raises:
        tf.errors.UnknownError: it has been aborted; says why.
    """
    said = native_library.functions().collective_nccl_problem().decode() if _nccl.is_open else ""
    if said:
        raise tf.errors.UnknownError(None, None, f"what this run gave is not to be used: {said}")
    return values


@functools.cache
def _of_nccl() -> Functions:
    """Returns NCCL's functions.

    Raises:
        OSError: there is no NCCL, or no driver.
        AttributeError: NCCL is too old.
    """
    nccl, driver = _library(), ctypes.CDLL("libcuda.so.1")
    functions = Functions()
    for library, fields in ((nccl, _NCCL), (driver, _DRIVER)):
        for field, name in fields.items():
            setattr(functions, field, _address(library, name))
    for field, name in _NEWER.items():
        with contextlib.suppress(AttributeError):
            setattr(functions, field, _address(nccl, name))
    return functions


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


def _library() -> ctypes.CDLL:
    """Loads NCCL from CuPy, its own package, or the system; there should be only one."""
    failure: OSError | None = None
    for name in _candidates():
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            failure = error
    assert failure is not None
    raise failure


def _candidates() -> Iterator[str]:
    newer_gpus.before_cupy()
    with contextlib.suppress(ImportError):
        import cupy.cuda.nccl  # noqa: F401  It loads NCCL, if it has one.
    # Horovod or CuPy may have loaded one already: two in one process use twice the memory.
    with contextlib.suppress(OSError):
        yield from dict.fromkeys(re.findall(r"/\S*/libnccl\.so\S*", _mapped_files()))
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations or () if package else ():
        yield str(Path(folder) / "nccl" / "lib" / "libnccl.so.2")
    yield "libnccl.so.2"


def _mapped_files() -> str:
    return Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
