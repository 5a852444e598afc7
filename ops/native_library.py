"""Finds the compiled TensorFlow operations (`ops/native/`), and tells whether they fit.

Set-up compiles the library against one TensorFlow (see setup.py).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import mmap
import re
from pathlib import Path
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.ops.graph import device_scopes


def _file() -> Path | None:
    here = Path(__file__).resolve().parent
    built = (here / f"_native{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in built if path.exists()), None)


@functools.cache
def missing() -> str | None:
    """Returns why the compiled operations can't be used here; None if they can."""
    path = _file()
    if path is None:
        return (
            "they were not built: run `make setup` (or python setup.py build_ext --inplace) in a "
            "checkout, or install the package with `pip install .`"
        )
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        match = re.search(rb"collective native, TensorFlow ([^;]*);", content)
        built_for = match.group(1).decode() if match else "none"
    if built_for != tf.__version__:
        return (
            f"they were built for TensorFlow {built_for}, and this is {tf.__version__}: run "
            "`make setup` again in a checkout, or pip install --force-reinstall --no-deps ."
        )
    return None


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
