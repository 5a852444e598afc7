"""Finds rows of dynamic tables for the compiled operation `CollectiveFindRows` on a GPU.

    CollectiveFindRows ──► Python: addresses of keys and rows ──► kernels on the operation's stream

The operation has allocated its results, and its inputs are ready once the stream has got that far:
nothing is copied to share it, and nothing waits. `ops/native/gpu/find_rows.cc` has the other side.
"""

from __future__ import annotations

import ctypes
import functools
import traceback
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from collective.ops import native_library
from collective.ops.gpu.kernel_api import Kernels
from collective.ops.gpu.memory_bridge import AdvisedMemoryError, MemoryBridge

# f(kernels, numbers [T], keys [K], how many of the keys each table has, steps, or None for no
# insertion) -> [K] int64.
Find = Callable[[Kernels, np.ndarray, Any, Sequence[int], "Sequence[int] | None"], Any]

_UNKNOWN, _RESOURCE_EXHAUSTED = 2, 8  # TensorFlow's codes of errors
_MESSAGE = 4096  # bytes
_NUMBERS = ctypes.POINTER(ctypes.c_int64)


class _Request(ctypes.Structure):
    """Holds an operation's request: `Request` of find_rows.cc."""

    _fields_ = [
        ("stream", ctypes.c_void_p),
        ("finder", ctypes.c_int64),
        ("tables", ctypes.c_int64),
        ("inserts", ctypes.c_int64),
        ("numbers", _NUMBERS),
        ("steps", _NUMBERS),
        ("sizes", _NUMBERS),
        ("keys", _NUMBERS),
        ("rows", _NUMBERS),
        ("message", ctypes.c_char * _MESSAGE),
    ]


_finders: list[tuple[MemoryBridge, Find]] = []


def number_of(bridge: MemoryBridge, find: Find) -> int:
    """Returns the number by which an operation of this process names `find`, with the kernels of
    `bridge`.
    """
    _install()
    if (bridge, find) not in _finders:
        _finders.append((bridge, find))
    return _finders.index((bridge, find))


@functools.cache
def _install() -> Any:
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Request))(_answer)
    native_library.functions().collective_gpu_finder(function)
    return function  # it has to live as long as the process


def _answer(request: Any) -> int:
    """Finds rows; returns 0, or the code of the error, whose text it puts into the request."""
    asked = request.contents
    bridge, find = _finders[asked.finder]
    try:
        _find(bridge, find, asked)
        return 0
    except AdvisedMemoryError as error:
        asked.message = _shortened(str(error))
        return _RESOURCE_EXHAUSTED
    except MemoryError as error:
        asked.message = _shortened(f"{error}. {bridge.advice()}")
        return _RESOURCE_EXHAUSTED
    except BaseException as error:  # ctypes would only print it
        asked.message = _shortened(f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}")
        return _UNKNOWN


def _find(bridge: MemoryBridge, find: Find, asked: _Request) -> None:
    count = asked.tables
    sizes = asked.sizes[:count]
    with bridge.call(asked.stream or 0):
        keys, rows = (
            [
                bridge.at(address, (size,), np.dtype(np.int64), None)
                for address, size in zip(addresses[:count], sizes)
            ]
            for addresses in (asked.keys, asked.rows)
        )
        found = find(
            bridge.kernels,
            np.array(asked.numbers[:count], np.int64),
            keys[0] if count == 1 else bridge.kernels.xp.concatenate(keys),
            sizes,
            asked.steps[:count] if asked.inserts else None,
        )
        first = 0
        for size, out in zip(sizes, rows):
            out[...] = found[first : first + size]
            first += size


def _shortened(text: str) -> bytes:
    return text.encode()[: _MESSAGE - 1]
