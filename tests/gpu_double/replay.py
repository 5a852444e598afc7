"""Lets a step's launches do nothing, so that the host's time is left to be measured.

Sizes that the host learns from the device are those of a step that was recorded. What is on the
device means nothing then: all of the step must be compiled operations.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

from collective.ops import native_library
from tests.gpu_double.driver import Table, installed

_SOURCE = Path(__file__).with_name("replay.cc")


@functools.cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "replay.so"
        options = ["-shared", "-fPIC", "-O2", "-std=c++17", "-fvisibility=hidden"]
        subprocess.run(["g++", *options, "-o", built, _SOURCE], check=True)
        loaded = ctypes.CDLL(str(built))
    loaded.replay_remember.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    return loaded


@functools.cache
def _table() -> Table:
    library, functions = _library(), []
    for name, made in Table._fields_:
        function = getattr(library, f"replay_{name}", library.replay_nothing)
        functions.append(ctypes.cast(function, made))
    return Table(*functions)


@contextlib.contextmanager
def replaying(step: Callable[[], Any]) -> Iterator[None]:
    """Runs `step` once, as always; inside, its launches do nothing."""
    stand_in, library = installed(), _library()
    stand_in.reset()
    step()
    library.replay_forget()
    for copied in stand_in.downloads:
        library.replay_remember(copied, len(copied))
    take = native_library.functions().collective_gpu_driver
    take(ctypes.byref(_table()))
    try:
        yield
    finally:
        take(ctypes.byref(stand_in.table))
