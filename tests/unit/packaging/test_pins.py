"""The versions in tools/pins, which set-up installs, are allowed by pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from collective import build_horovod

try:
    import tomllib
except ImportError:  # before Python 3.11; pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]
PYTHONS = {"2.21": ("3.13", "3.12", "3.11", "3.10"), "2.15": ("3.11", "3.10", "3.9")}
VERSIONS = [(tensorflow, python) for tensorflow, each in PYTHONS.items() for python in each]


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def project() -> dict[str, Any]:
    return pyproject()["project"]


def pins(tensorflow: str, name: str) -> dict[str, str]:
    path = ROOT / "tools" / "pins" / f"tensorflow{tensorflow}" / name
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def assert_allowed(requirements: list[str], python: str, pinned: dict[str, str]) -> None:
    for requirement in map(Requirement, requirements):
        if requirement.marker and not requirement.marker.evaluate({"python_version": python}):
            continue
        version = pinned.get(canonicalize_name(requirement.name))
        assert version, f"{requirement} is not pinned: run tools/pin.sh"
        assert requirement.specifier.contains(version), (
            f"{requirement} does not allow the pinned {version}"
        )


@pytest.mark.parametrize("tensorflow, python", VERSIONS)
def test_every_requirement_is_pinned_within_its_range(tensorflow: str, python: str):
    extras = project()["optional-dependencies"]
    pinned = pins(tensorflow, f"python{python}.txt")
    chosen = ("data", "datasets", "recommenders", "serve", "tensorboard", "test")
    optional = [text for extra in chosen for text in extras[extra]]
    if tensorflow != "2.15" and python in PYTHONS["2.15"]:
        # There the extra is for TensorFlow 2.15, whose protobuf is older.
        optional = [text for text in optional if not text.startswith("tensorflow-metadata")]
    assert_allowed([*project()["dependencies"], *optional], python, pinned)
    assert_allowed(extras["gpu"], python, {**pinned, **pins(tensorflow, "gpu.txt")})
    assert pinned["horovod"] == "0.28.1"
    for requirement in ("tensorflow", "tf-keras"):
        assert pinned[requirement].startswith(f"{tensorflow}.")


@pytest.mark.parametrize("tensorflow, python", VERSIONS)
def test_the_pins_can_build_horovod(tensorflow: str, python: str):
    tools = ["setuptools<70", "wheel<0.46", "cmake<4", "packaging", "pip<25.3"]
    assert_allowed(tools, python, pins(tensorflow, f"python{python}.txt"))


@pytest.mark.parametrize("tensorflow", PYTHONS)
def test_one_cuda_compiler_fits_the_headers(tensorflow: str):
    """CuPy gives NVRTC the headers of CUDA's runtime; both are of TensorFlow's CUDA."""
    runtime = pins(tensorflow, "gpu.txt")["nvidia-cuda-runtime-cu12"].split(".")[:2]
    for python in PYTHONS[tensorflow]:
        compiler = pins(tensorflow, f"python{python}.txt")["nvidia-cuda-nvrtc-cu12"]
        assert compiler.split(".")[:2] == runtime


@pytest.mark.parametrize("tensorflow", PYTHONS)
def test_formatters_and_types_are_the_same_everywhere(tensorflow: str):
    for python in PYTHONS[tensorflow]:
        pinned, newest = (
            {name: found[name] for name in ("ruff", "clang-format", "mypy")}
            for found in (pins(tensorflow, f"python{python}.txt"), pins("2.21", "python3.13.txt"))
        )
        assert pinned == newest


def test_the_build_has_the_tensorflow_that_the_library_requires():
    """Without it in the isolated build, pip would install the library without its operations."""
    (required,) = [line for line in project()["dependencies"] if line.startswith("tensorflow>")]
    builds = [text.partition(" ;")[0] for text in pyproject()["build-system"]["requires"]]
    assert required in builds
    assert required == build_horovod.TENSORFLOW
    assert f"'{required}'" in (ROOT / "setup.py").read_text(encoding="utf-8")
    for tensorflow, python in VERSIONS:
        pinned = pins(tensorflow, f"python{python}.txt")["tensorflow"]
        assert Requirement(required).specifier.contains(pinned)


def test_the_installed_packages_work_together():
    """A protobuf that doesn't fit shows on import only, where tensorflow-datasets just logs it."""
    program = "import tensorflow_datasets as tfds; print(tfds.core.BuilderConfig.__name__)"
    finished = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert finished.stdout == "BuilderConfig\n"


def test_the_same_versions_are_named_everywhere():
    folder = ROOT / "tools" / "pins"
    assert {str(path.relative_to(folder)) for path in folder.glob("*/*")} == {
        *(f"tensorflow{tensorflow}/gpu.txt" for tensorflow in PYTHONS),
        *(f"tensorflow{tensorflow}/python{python}.txt" for tensorflow, python in VERSIONS),
    }
    assert project()["requires-python"] == ">=3.9,<3.14"
    setup = (ROOT / "tools" / "setup.sh").read_text(encoding="utf-8")
    assert f"readonly RELEASES='{' '.join(PYTHONS)}'\n" in setup
    listed = " ".join(f"[{name}]='{' '.join(pythons)}'" for name, pythons in PYTHONS.items())
    assert f"readonly -A PYTHONS=({listed})\n" in setup
