"""Compiles a kernel source to a shared library, once for each content."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

from collective.ops.gpu.sources import Source

HERE = Path(__file__).resolve().parent
FLAGS = (
    "-std=c++17",
    "-O1",
    "-g0",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fsanitize=alignment",
    "-U_FORTIFY_SOURCE",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-attributes",
    "-Wno-unused-function",
    "-Werror",
)
SECONDS = 120
_DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w\s]+?)\s*(\w+)\s*\[\s*\]\s*;"
)

_ENTRY = """
extern "C" __attribute__((visibility("default"))) const char* launch_{name}(
    const cuda_on_cpu::Launch* launch, void** arguments, int given) {{
  return cuda_on_cpu::Start(&{name}, *launch, arguments, given);
}}
extern "C" __attribute__((visibility("default")))
const int* sizes_{name}() {{ return cuda_on_cpu::Sizes(&{name}); }}
"""


@functools.cache
def _folder() -> Path:
    """Returns the folder of libraries, outside of the checkout: a user may run the tests again."""
    folder = Path(tempfile.gettempdir()) / f"collective-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        return Path(tempfile.mkdtemp(prefix="collective-emulator-"))
    return folder


def library(text: str, kernels: tuple[str, ...]) -> Path:
    """Builds the shared library of the CUDA source `text`, with `launch_NAME` and `sizes_NAME` for
    each of its `kernels`.

    Raises:
        RuntimeError: g++ refuses it; with what it said.
    """
    text = _DYNAMIC_SHARED.sub(
        r"\1* const \2 = reinterpret_cast<\1*>(cuda_on_cpu::dynamic_shared);", text
    )
    program = "\n".join(
        ['#include "cuda_on_cpu.h"', text, *(_ENTRY.format(name=name) for name in kernels)]
    )
    headers = "".join(file.read_text(encoding="utf-8") for file in sorted(HERE.glob("*.h")))
    digest = hashlib.sha256("\0".join([program, headers, *FLAGS]).encode()).hexdigest()[:32]
    built = _folder() / f"{digest}.so"
    if built.exists():
        return built
    with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
        source, made = Path(scratch) / "kernels.cc", Path(scratch) / "kernels.so"
        source.write_text(program, encoding="utf-8")
        finished = subprocess.run(
            ["g++", *FLAGS, f"-I{HERE}", str(source), "-o", str(made)],
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        if finished.returncode != 0:
            raise RuntimeError(f"g++ refuses a kernel source:\n{finished.stderr}")
        os.replace(made, built)
    return built


def library_of(source: Source) -> Path:
    """Builds the shared library of a source file."""
    return library(source.text(), source.kernels)
