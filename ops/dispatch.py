"""Chooses, by device, the operations that compute around an exchange.

On a CPU it is the compiled library (`ops/native`), on a GPU CuPy's kernels (`ops/gpu`), which stand
in the graph as calls of Python. Whoever wants to know which of them an operation is, or an
attribute of it, asks here.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import native_library, op_attributes, placement

_inside = threading.local()


@contextlib.contextmanager
def for_tables(tables: Sequence[str], in_host_memory: bool) -> Iterator[None]:
    """Makes `operations` those for these tables, inside: in the host's memory, or by kernels."""
    previous, _inside.about = (
        getattr(_inside, "about", ((), False)),
        (tuple(tables), in_host_memory),
    )
    try:
        yield
    finally:
        _inside.about = previous


def operations() -> Any:
    """Returns an object with the operations of the compiled library: the library, or its stand-in.

    Raises:
        ImportError: the compiled library can't be used here; it says why.
        RuntimeError: CuPy can't; it says why.
    """
    tables, in_host_memory = getattr(_inside, "about", ((), False))
    return (
        native_library.library()
        if placement.chosen() == "cpu" or in_host_memory
        else _stand_in().about(tables)
    )


@functools.cache
def _stand_in() -> Any:
    from collective.ops.gpu import binding, sides  # Needs no CuPy, but takes a while.

    return binding.Bound(sides.Gpu() if placement.chosen() == "gpu" else sides.Double())


def side() -> Any:
    """Returns the `collective.ops.gpu.sides.Side` on which kernels compute."""
    return _stand_in().side


def operations_of(op: tf.Operation) -> Any:
    """Returns the operations of which `op` is one."""
    return (
        _stand_in().about(op_attributes.attribute(op, "of"))
        if op_attributes.stands_in(op)
        else native_library.library()
    )


def device(dynamic: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Returns `tf.device` for the memory of dynamic tables, or of static ones.

    In the host's memory, tables are where the script has them.
    """
    return (
        tf.device("/gpu:0")
        if placement.chosen() == "gpu" and placement.on_device(dynamic)
        else contextlib.nullcontext()
    )
