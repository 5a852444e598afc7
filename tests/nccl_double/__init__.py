"""Stands in for NCCL where there is no GPU: the same functions, between processes on CPUs.

`double.cc` has them; `use()` puts them where the carrier `nccl` looks for NCCL's. A job's programs
do it before they make a strategy:

    from tests import nccl_double
    nccl_double.use()
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from collective.ops.communication import nccl

SOURCE = Path(__file__).with_name("double.cc")


def use() -> ctypes.CDLL:
    """Lets this process exchange by the double; returns it, for what else a test tells it."""
    double = library()
    names = {**nccl._NCCL, **nccl._NEWER}
    functions = nccl.Functions(
        **{
            field: ctypes.cast(getattr(double, name), ctypes.c_void_p).value
            for field, name in names.items()
        }
    )
    nccl.use(functions)
    return double


@functools.cache
def library() -> ctypes.CDLL:
    """Loads the double, compiled once for all processes."""
    double = ctypes.CDLL(str(built()))
    double.double_journal.restype = ctypes.c_char_p
    return double


def built() -> Path:
    """Compiles the double, unless that was done; returns its file."""
    version = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"collective-nccl-double-{os.getuid()}-{version}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread"]
            subprocess.run([*command, str(SOURCE), "-o", str(made)], check=True)
            made.rename(path)
    return path
