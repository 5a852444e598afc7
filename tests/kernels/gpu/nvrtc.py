"""NVIDIA's compiler at run time, from PyPI: what CuPy compiles with. No GPU is needed."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
from pathlib import Path
from typing import Any, NamedTuple

from collective.ops.gpu.cupy_device import kept_locale


class Compiled(NamedTuple):
    """Holds what the compiler made, and what it said."""

    cubin: bytes
    log: str


class CompileError(RuntimeError):
    """Says what the compiler said of a source that it refuses."""


def distribution(architecture: str) -> str:
    """Returns where the compiler for an architecture is from: the oldest release that CuPy may use,
    or a newer one for GPUs which that doesn't know.
    """
    known = int(architecture.removeprefix("sm_")) < 100
    return "nvidia-cuda-nvrtc-cu12" if known else "nvidia-cuda-nvrtc"


def is_installed(name: str) -> bool:
    return bool(_files(name))


def _files(name: str) -> list[Path]:
    """Lists the libraries of a distribution."""
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if ".so." in file.name]


@functools.cache
def _library(name: str) -> Any:
    files = _files(name)
    assert files, f"{name} is missing; make setup installs it"
    # The compiler loads its built-in functions by name.
    for file in files:
        if file.name.startswith("libnvrtc-builtins.so."):
            ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    (library,) = [file for file in files if file.name.startswith("libnvrtc.so.")]
    return ctypes.CDLL(str(library))


def compiled(text: str, architecture: str, options: tuple[str, ...]) -> Compiled:
    """Returns machine code of a CUDA source for an architecture as 'sm_90'.

    Raises:
        CompileError: it is refused.
    """
    library = _library(distribution(architecture))

    def call(name: str, *arguments: Any) -> int:
        return int(getattr(library, f"nvrtc{name}")(*arguments))

    def output(name: str) -> bytes:
        size = ctypes.c_size_t()
        assert call(f"Get{name}Size", program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert call(f"Get{name}", program, buffer) == 0
        return buffer.raw

    program, source = ctypes.c_void_p(), text.encode()
    assert call("CreateProgram", ctypes.byref(program), source, b"kernels.cu", 0, None, None) == 0
    try:
        given = [
            f"--gpu-architecture={architecture}".encode(),
            *(option.encode() for option in options),
        ]
        with kept_locale():
            result = call(
                "CompileProgram", program, len(given), (ctypes.c_char_p * len(given))(*given)
            )
        log = output("ProgramLog").rstrip(b"\0").decode()
        if result != 0:
            raise CompileError(log)
        return Compiled(output("CUBIN"), log)
    finally:
        call("DestroyProgram", ctypes.byref(program))
