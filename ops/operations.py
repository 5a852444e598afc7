"""Which operations compute around an exchange: one place chooses, by device.

On a CPU it is the compiled library (`ops/native`), on a GPU CuPy's kernels (`ops/gpu`), which stand
in the graph as calls of Python. Who asks of an operation which it is, or for an attribute of it,
asks here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.core.framework import attr_value_pb2

from collective.ops import compiled

CHOICE = "COLLECTIVE_KERNELS"
WORKSPACE = "COLLECTIVE_GPU_WORKSPACE"
DYNAMIC = "COLLECTIVE_DYNAMIC_TABLES"
CHOICES = ("auto", "cpu", "gpu")
INJECTED = "injected"
_KIND, _ATTRIBUTES = "_collective_kind", "_collective_attributes"


def memory_shares() -> tuple[float, float]:
    """What kernels and TensorFlow may have of a GPU's memory, as fractions: the environment
    variable COLLECTIVE_GPU_WORKSPACE (0.2), and what is left but for 5 %, which CUDA, NCCL and
    cuDNN take. Tables are TensorFlow's.

    Raises:
        ValueError: it isn't a number between 0.01 and 0.9.
    """
    given = os.environ.get(WORKSPACE) or "0.2"
    try:
        share = float(given)
    except ValueError:
        share = float("nan")
    if not 0.01 <= share <= 0.9:
        raise ValueError(
            f"{WORKSPACE}={given}: it must be the fraction of a GPU's memory that kernels may have "
            "for what they need in a step, between 0.01 and 0.9"
        )
    return share, 0.95 - share


_injected: Callable[[], Any] | None = None


def use(make: Callable[[], Any] | None) -> None:
    """Has what `make` returns stand in for the compiled operations, in the place of a GPU's kernels;
    with None the environment chooses again. To be called before the process makes its first graph.
    """
    global _injected
    _injected = make
    _stand_in.cache_clear()


def chosen() -> str:
    """Returns 'cpu' or 'gpu', as the environment says, or 'injected' behind `use`.

    Raises:
        ValueError, RuntimeError: as `from_environment`.
    """
    return from_environment() if _injected is None else INJECTED


@functools.cache
def from_environment() -> str:
    """Chooses 'cpu' or 'gpu' by the environment variable COLLECTIVE_KERNELS. Without it, or if it is
    'auto': 'gpu' where TensorFlow sees a GPU and there is CuPy.

    Raises:
        ValueError: it is something else.
        RuntimeError: it is 'gpu', and TensorFlow sees none.
    """
    choice = os.environ.get(CHOICE, "").lower() or "auto"
    if choice not in CHOICES:
        raise ValueError(
            f"{CHOICE}={choice}: there is no such choice. Known: {', '.join(CHOICES)}."
        )
    if choice == "cpu":
        return choice
    sees = bool(tf.config.list_physical_devices("GPU"))
    if choice == "gpu":
        if not sees:
            raise RuntimeError(
                f"{CHOICE}=gpu, but TensorFlow sees no GPU: look at nvidia-smi, "
                f"CUDA_VISIBLE_DEVICES and tf.config.list_physical_devices(), or leave {CHOICE} out"
            )
        return choice
    if sees and importlib.util.find_spec("cupy") is None:
        tf.logging.warning(
            "TensorFlow sees a GPU, but there is no CuPy: tables stay in the host's memory and "
            "are looked up there. pip install .[gpu] puts them on the GPU; %s=cpu silences this.",
            CHOICE,
        )
        return "cpu"
    return "gpu" if sees else "cpu"


def on_device(dynamic: bool) -> bool:
    """Whether kernels look dynamic tables up, and update them, or static ones; if not, they are in
    the host's memory.

    Dynamic tables are where static ones are, unless the environment variable
    COLLECTIVE_DYNAMIC_TABLES is 'host', not 'gpu': for those that the GPU's memory has no room for.

    Raises:
        ValueError: it is something else.
    """
    where = os.environ.get(DYNAMIC, "").lower() or "gpu"
    if where not in ("gpu", "host"):
        raise ValueError(f"{DYNAMIC}={where}: there is no such choice. Known: gpu, host.")
    return chosen() != "cpu" and not (dynamic and where == "host")


_inside = threading.local()


@contextlib.contextmanager
def about(tables: Sequence[str], in_host_memory: bool) -> Iterator[None]:
    """Inside, `operations` are those for these tables: in the host's memory, or where kernels
    compute.
    """
    before, _inside.about = getattr(_inside, "about", ((), False)), (tuple(tables), in_host_memory)
    try:
        yield
    finally:
        _inside.about = before


def operations() -> Any:
    """What has the operations of the compiled library: itself, or what stands in for it.

    Raises:
        ImportError: the compiled library can't be used here; it says why.
        RuntimeError: CuPy can't; it says why.
    """
    tables, in_host_memory = getattr(_inside, "about", ((), False))
    return compiled.library() if chosen() == "cpu" or in_host_memory else _stand_in().about(tables)


@functools.cache
def _stand_in() -> Any:
    if _injected is not None:
        return _injected()
    # needs no CuPy, but takes a while to import
    from collective.ops.gpu.memory_bridge import GpuBridge
    from collective.ops.gpu.tensorflow_binding import DeviceOperations

    return DeviceOperations(GpuBridge())


def side() -> Any:
    """Returns what shares memory with the kernels: a `collective.ops.gpu.memory_bridge.MemoryBridge`."""
    return _stand_in().bridge


def operations_of(op: tf.Operation) -> Any:
    """Those of which `op` is one."""
    return _stand_in().about(attribute(op, "of")) if stands_in(op) else compiled.library()


def device(dynamic: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Where the memory of dynamic tables is, or of static ones: `tf.device` for it, or where a
    script has them.
    """
    return (
        tf.device("/gpu:0")
        if chosen() == "gpu" and on_device(dynamic)
        else contextlib.nullcontext()
    )


def marks(kind: str, attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes by which an operation tells that it is in the place of one of this kind."""
    return {
        _KIND: attr_value_pb2.AttrValue(s=kind.encode()),
        _ATTRIBUTES: attr_value_pb2.AttrValue(s=json.dumps(attributes).encode()),
    }


def kind(op: tf.Operation) -> str:
    """The type of `op`, or of the compiled operation in whose place it is."""
    return str(op.get_attr(_KIND).decode()) if stands_in(op) else str(op.type)


def attribute(op: tf.Operation, name: str) -> Any:
    """An attribute of `op`, or of the compiled operation in whose place it is."""
    return (
        json.loads(op.get_attr(_ATTRIBUTES).decode())[name] if stands_in(op) else op.get_attr(name)
    )


def stands_in(op: tf.Operation) -> bool:
    """Whether `op` stands in for a compiled operation."""
    return op.type == "EagerPyFunc" and _KIND in op.node_def.attr
