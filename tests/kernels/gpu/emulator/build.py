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
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-U_FORTIFY_SOURCE",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-attributes",
    "-Wno-unused-function",
    "-Werror",
)
CHECKED = ("-fsanitize=alignment",)
SEARCHED = (
    "-g1",
    "-fsanitize=thread",
    "--param=tsan-distinguish-volatile=1",
    "-DSEARCHES_RACES",
)
SEARCH = HERE / "race_search.cc"
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


def library(text: str, kernels: tuple[str, ...], searches_races: bool = False) -> Path:
    """Builds the shared library of the CUDA source `text`, with `launch_NAME` and `sizes_NAME` for
    each of its `kernels`.

    Args:
        searches_races: each launch is searched for races, of which `races_found` tells afterwards.

    Raises:
        RuntimeError: g++ refuses it; with what it said.
    """
    text = _DYNAMIC_SHARED.sub(
        r"\1* const \2 = reinterpret_cast<\1*>(cuda_on_cpu::dynamic_shared);", text
    )
    program = "\n".join(
        ['#include "cuda_on_cpu.h"', text, *(_ENTRY.format(name=name) for name in kernels)]
    )
    if searches_races:
        return _compiled(program, (*FLAGS, *SEARCHED), (_search(),))
    return _compiled(program, (*FLAGS, *CHECKED))


@functools.cache
def _search() -> Path:
    """Builds what searches for races: not compiled as kernels are, or it would search itself."""
    program = SEARCH.read_text(encoding="utf-8")
    return _compiled(program, (*FLAGS, "-O2", "-DSEARCHES_RACES"), kind=".o")


def _compiled(
    program: str, flags: tuple[str, ...], objects: tuple[Path, ...] = (), kind: str = ".so"
) -> Path:
    """Compiles a program, and links it with objects to a shared library if that is its kind."""
    headers = "".join(file.read_text(encoding="utf-8") for file in sorted(HERE.glob("*.h")))
    parts = [program, headers, *flags, *(file.name for file in objects)]
    built = _folder() / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}{kind}"
    if built.exists():
        return built
    with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
        source, compiled = Path(scratch) / "kernels.cc", Path(scratch) / "kernels.o"
        source.write_text(program, encoding="utf-8")
        _run("g++", *flags, f"-I{HERE}", "-c", source, "-o", compiled)
        if kind == ".so":
            linked = Path(scratch) / "kernels.so"
            _run("g++", "-shared", "-Wl,-z,defs", compiled, *objects, "-o", linked)
            compiled = linked
        os.replace(compiled, built)
    return built


def _run(*command: str | Path) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if finished.returncode != 0:
        raise RuntimeError(f"g++ refuses a kernel source:\n{finished.stderr}")


def library_of(source: Source, searches_races: bool = False) -> Path:
    """Builds the shared library of a source file."""
    return library(source.text(), source.kernels, searches_races)
