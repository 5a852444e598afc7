"""Finds the compiled TensorFlow operations (`ops/native/`), and tells whether they fit.

Each library is compiled against one TensorFlow, which its name has (see setup.py).
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.ops.graph import device_scopes


def _file() -> Path:
    return Path(__file__).resolve().with_name(f"_native.tensorflow-{tf.__version__}.so")


@functools.cache
def missing() -> str | None:
    """Returns why the compiled operations can't be used here; None if they can."""
    path = _file()
    if path.exists():
        return None
    built = sorted(other.stem.rpartition("-")[2] for other in path.parent.glob("_native.*.so"))
    if not built:
        return (
            "they were not built: run `make setup` (or python setup.py build_ext --inplace) in a "
            "checkout, or install the package with `pip install .`"
        )
    return (
        f"they were built for TensorFlow {', '.join(built)}, and this is {tf.__version__}: run "
        "`make setup` again in a checkout, or build them for this one by pip install "
        "--no-build-isolation --force-reinstall --no-deps ."
    )


@functools.cache
def library() -> Any:
    """Returns the compiled operations, which are loaded once.

    Raises:
        ImportError: they can't be used here; says why.
    """
    reason = missing()
    if reason is not None:
        raise ImportError(f"the compiled operations of collective: {reason}")
    return tf.load_op_library(str(_file()))


class _HostOperations:
    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(library(), name)

        @functools.wraps(operation)
        def on_cpu(*args: Any, **kwargs: Any) -> Any:
            with device_scopes.on_host():
                return operation(*args, **kwargs)

        return on_cpu


@functools.cache
def on_host() -> Any:
    """Returns the compiled operations like `library` does, but placed on the CPU.

    Some also have kernels for GPUs, which take other inputs: TensorFlow would choose those.
    """
    library()
    return _HostOperations()


@functools.cache
def functions() -> Any:
    """Returns the functions of the library that Python calls directly, by ctypes.

    Raises:
        ImportError: they can't be used here; says why.
    """
    library()  # The file is loaded once: both share it.
    return ctypes.CDLL(str(_file()))
