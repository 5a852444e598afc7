"""NVIDIA's compiler at run time, from PyPI: what CuPy compiles with. No GPU is needed."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

from collective.ops.gpu.cupy_device import kept_locale


class Compiled(NamedTuple):
    """Holds what the compiler made, and what it said."""

    cubin: bytes
    log: str


class CompileError(RuntimeError):
    """Says what the compiler said of a source that it refuses."""


@functools.cache
def _library() -> Any:
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    assert spec is not None, "install nvidia-cuda-nvrtc-cu12 (make setup does)"
    folder = Path(list(spec.submodule_search_locations or ())[0]) / "lib"
    # The compiler loads its built-in functions by name.
    for file in folder.glob("libnvrtc-builtins.so*"):
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    (library,) = folder.glob("libnvrtc.so.*")
    return ctypes.CDLL(str(library))


def _call(name: str, *arguments: Any) -> int:
    return int(getattr(_library(), f"nvrtc{name}")(*arguments))


def _bytes(name: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    assert _call(f"Get{name}Size", program, ctypes.byref(size)) == 0
    buffer = ctypes.create_string_buffer(size.value)
    assert _call(f"Get{name}", program, buffer) == 0
    return buffer.raw


def compiled(text: str, architecture: str, options: tuple[str, ...]) -> Compiled:
    """Returns machine code of a CUDA source for an architecture as 'sm_90'.

    Raises:
        CompileError: it is refused.
    """
    program = ctypes.c_void_p()
    assert (
        _call("CreateProgram", ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None)
        == 0
    )
    try:
        given = [
            f"--gpu-architecture={architecture}".encode(),
            *(option.encode() for option in options),
        ]
        with kept_locale():
            result = _call(
                "CompileProgram", program, len(given), (ctypes.c_char_p * len(given))(*given)
            )
        log = _bytes("ProgramLog", program).rstrip(b"\0").decode()
        if result != 0:
            raise CompileError(log)
        return Compiled(_bytes("CUBIN", program), log)
    finally:
        _call("DestroyProgram", ctypes.byref(program))
