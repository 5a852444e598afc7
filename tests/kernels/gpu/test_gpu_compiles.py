"""Every kernel compiles for the GPUs that there are, without a warning and without a spill. No GPU
is needed.
"""

from __future__ import annotations

import importlib
import locale
import re

import pytest

from collective.ops.gpu import compiled_launches
from collective.ops.gpu.checks import FAMILIES
from collective.ops.gpu.cupy_device import OPTIONS
from collective.ops.gpu.sources import FOLDER, Source
from tests.kernels.gpu.nvrtc import CompileError, compiled, distribution, is_installed

# As CuPy compiles, which adds the second one.
ALL_OPTIONS = (*OPTIONS, "-ftz=true", "--ptxas-options=-v")
SOURCES = [
    importlib.import_module(f"collective.ops.gpu.{name}").SOURCE
    for name in FAMILIES
    if name not in ("step", "reserved")  # which have no kernels of their own
]
SOURCES += [
    compiled_launches.ASK,
    compiled_launches.ASK_BAGS,
    compiled_launches.BAGS,
    compiled_launches.WRITE,
]
_KERNEL = re.compile(r"Compiling entry function '(\w+)'")
_LOCAL = re.compile(r"([1-9]\d*) bytes (stack frame|spill stores|spill loads)")


def complaints(text: str, kernels: tuple[str, ...], architecture: str) -> list[str]:
    """Returns what is not as it should be of a source with these kernels."""
    log = compiled(text, architecture, ALL_OPTIONS).log
    found = [line for line in log.splitlines() if "warning" in line.lower() or _LOCAL.search(line)]
    if sorted(_KERNEL.findall(log)) != sorted(kernels):
        found.append(f"kernels {_KERNEL.findall(log)}, not {kernels}")
    return found


@pytest.mark.slow
@pytest.mark.sample(8)
@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.file)
def test_kernels_compile_without_warnings_and_spills(source: Source, architecture: str):
    if not is_installed(compiler := distribution(architecture)):
        pytest.skip(f"{compiler} is missing; make setup installs it")
    assert complaints(source.text(), source.kernels, architecture) == []


def test_every_source_is_of_a_family():
    assert {file.name for file in FOLDER.glob("*.cu")} == {source.file for source in SOURCES}


def test_every_header_is_used():
    assert not [
        file.name
        for file in FOLDER.glob("*.cuh")
        if not any(f'#line 1 "{file.name}"' in source.text() for source in SOURCES)
    ]


@pytest.mark.parametrize(
    "body, complaint",
    [
        ("int unused;", "was declared but never referenced"),
        (
            "float kept[64]; for (int i = 0; i < 640; ++i) kept[int(in[i]) & 63] += i; *in = "
            "kept[int(in[1]) & 63];",
            "bytes stack frame",
        ),
    ],
)
def test_warnings_and_local_memory_are_seen(body: str, complaint: str):
    text = f'extern "C" __global__ void kernel(float* in) {{ {body} }}'
    assert any(complaint in line for line in complaints(text, ("kernel",), "sm_90"))


def test_an_error_names_file_and_line():
    declaration = "__device__ __forceinline__ u64 mix("
    lines = FOLDER.joinpath("placement.cuh").read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.startswith(declaration))
    text = Source("distinct.cu", ()).text().replace(declaration, "__device__ u65 mix(")
    with pytest.raises(
        CompileError, match=rf'placement.cuh\({number}\): error: identifier "u65" is undefined'
    ):
        compiled(text, "sm_90", ALL_OPTIONS)


def test_no_source_is_long():
    files = [*FOLDER.glob("*.cu"), *FOLDER.glob("*.cuh")]
    assert not [
        file.name for file in files if len(file.read_text(encoding="utf-8").splitlines()) > 320
    ]


def test_compiling_leaves_the_locale():
    """Else whatever this process reads afterwards is ASCII."""
    before = locale.getpreferredencoding(False)
    compiled('extern "C" __global__ void nothing() {}', "sm_80", ())
    assert locale.getpreferredencoding(False) == before
