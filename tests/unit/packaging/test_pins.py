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
PYTHONS = ("3.9", "3.10", "3.11")


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def project() -> dict[str, Any]:
    return pyproject()["project"]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "tools" / "pins" / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def assert_allowed(requirements: list[str], pinned: dict[str, str]) -> None:
    for requirement in map(Requirement, requirements):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version, f"{requirement} is not pinned: run tools/pin.sh"
        assert requirement.specifier.contains(version), (
            f"{requirement} does not allow the pinned {version}"
        )


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_is_pinned_within_its_range(python: str):
    extras = project()["optional-dependencies"]
    pinned = pins(f"python{python}.txt")
    optional = [text for extra in ("data", "datasets", "test") for text in extras[extra]]
    assert_allowed([*project()["dependencies"], *optional], pinned)
    assert_allowed(extras["gpu"], {**pinned, **pins("gpu.txt")})
    assert pinned["horovod"] == "0.28.1"


@pytest.mark.parametrize("python", PYTHONS)
def test_the_pins_can_build_horovod(python: str):
    pinned = pins(f"python{python}.txt")
    assert_allowed(["setuptools<70", "wheel<0.46", "cmake<4", "packaging", "pip<25.3"], pinned)


def test_the_build_has_the_tensorflow_that_the_library_requires():
    """Without it in the isolated build, pip would install the library without its operations."""
    (required,) = [line for line in project()["dependencies"] if line.startswith("tensorflow>")]
    builds = [text.partition(" ;")[0] for text in pyproject()["build-system"]["requires"]]
    assert required in builds
    assert required == build_horovod.TENSORFLOW
    assert f"'{required}'" in (ROOT / "setup.py").read_text(encoding="utf-8")
    for python in PYTHONS:
        assert Requirement(required).specifier.contains(pins(f"python{python}.txt")["tensorflow"])


def test_the_installed_packages_work_together():
    """A protobuf that doesn't fit shows on import only, where tensorflow-datasets just logs it."""
    program = "import tensorflow_datasets as tfds; print(tfds.core.BuilderConfig.__name__)"
    finished = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert finished.stdout == "BuilderConfig\n"


def test_the_same_pythons_are_named_everywhere():
    assert {path.name for path in (ROOT / "tools" / "pins").iterdir()} == {
        "gpu.txt",
        *(f"python{python}.txt" for python in PYTHONS),
    }
    assert project()["requires-python"] == ">=3.9,<3.12"
    setup = (ROOT / "tools" / "setup.sh").read_text(encoding="utf-8")
    assert f"readonly SUPPORTED='{' '.join(reversed(PYTHONS))}'" in setup
