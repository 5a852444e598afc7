"""The wheel and the source distribution hold every module once, under a checkout's names.

A wheel also holds the compiled libraries.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from checkout_copy import ROOT, SUBPACKAGES, copy_checkout, run

pytestmark = pytest.mark.matrix
DATA = (".cu", ".cuh", ".cc", ".h")
TENSORFLOW = version("tensorflow")
LIBRARIES = ("_gloo_address.so", "_keymap.so", f"_native.tensorflow-{TENSORFLOW}.so")


def build_wheel(source: Path, target: Path) -> Path:
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", target)
    run(sys.executable, "-m", "pip", "wheel", source, *options, cwd=target)
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies the checkout, since a build leaves folders behind, and adds a kernel to it."""
    copy = copy_checkout(tmp_path_factory.mktemp("source") / "checkout")
    (copy / "ops" / "gpu" / "packaging_probe.cu").write_text("// kernel\n")
    # Set-up has compiled the libraries: a build takes those that are newer than their sources.
    interpreter = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    built = copy / "build" / f"lib.{interpreter}" / "collective" / "ops"
    built.mkdir(parents=True)
    for library in LIBRARIES:
        shutil.copy(ROOT / "collective" / "ops" / library, built)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(checkout, tmp_path_factory.mktemp("wheel"))


def package_files(wheel: Path) -> list[str]:
    return sorted(name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name)


def files_of(checkout: Path) -> list[str]:
    """Lists the files that a wheel must hold: those of the four folders, and three libraries."""
    names = [f"collective/ops/{library}" for library in LIBRARIES]
    names.append("collective/py.typed")
    for directory, _, files in os.walk(checkout / "collective"):  # links not followed
        for file in files:
            if file.endswith((".py", ".jinja2")):
                names.append(str((Path(directory) / file).relative_to(checkout)))
    for folder in SUBPACKAGES:
        for path in (checkout / folder).rglob("*"):
            if path.suffix in (".py", *DATA):
                names.append(f"collective/{path.relative_to(checkout)}")
    return sorted(names)


def test_the_wheel_holds_every_module_once(checkout: Path, wheel: Path):
    assert package_files(wheel) == files_of(checkout)


def test_the_wheel_names_its_licence_and_does_not_require_horovod(wheel: Path):
    archive = zipfile.ZipFile(wheel)
    names = {name.rpartition("/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
    metadata = archive.read(names["METADATA"]).decode().splitlines()
    assert "License: Apache-2.0" in metadata
    assert archive.read(names["LICENSE"]) == (ROOT / "LICENSE").read_bytes()
    requirements = [line for line in metadata if line.startswith("Requires-Dist")]
    assert "horovod" not in " ".join(requirements).lower()
    assert archive.read(names["top_level.txt"]).split() == [b"collective"]


@pytest.mark.long
def test_a_wheel_built_from_the_source_distribution_is_the_same(
    checkout: Path, wheel: Path, tmp_path: Path
):
    program = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", program, tmp_path, cwd=checkout)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = opened.getnames()
        assert len(names) == len(set(names))
        opened.extractall(tmp_path)
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (tmp_path / "wheel").mkdir()
    assert package_files(build_wheel(unpacked, tmp_path / "wheel")) == package_files(wheel)


def test_an_installed_wheel_is_importable_without_the_checkout(wheel: Path, tmp_path: Path):
    target = tmp_path / "installed"
    install = (sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, wheel)
    run(*install, cwd=tmp_path)
    program = """
import collective.launch, collective.ops.rows.keymap
assert len(collective.ops.rows.keymap.KeyMap(9)) == 0
print(collective.launch.__file__)
"""
    printed = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(target))
    assert Path(printed.strip()) == target / "collective" / "launch" / "__init__.py"
    run(sys.executable, "-m", "collective.launch", "--help", cwd=tmp_path, PYTHONPATH=str(target))
    command = target / "bin" / "collective"
    assert run(command, "--version", cwd=tmp_path, PYTHONPATH=str(target)).startswith("collective ")
    for folder in SUBPACKAGES:
        assert not (target / folder).exists()


@pytest.mark.timeout(600)
def test_a_wheel_installs_in_an_environment_of_its_own(
    package_index: None, wheel: Path, tmp_path: Path
):
    """What it requires is all there is: pip finds no conflict, and the operations load."""
    python = tmp_path / "fresh" / "bin" / "python"
    run(sys.executable, "-m", "venv", tmp_path / "fresh", cwd=tmp_path)
    # The newest TensorFlow by itself, for which this wheel has no operations.
    wanted = (wheel, f"tensorflow=={TENSORFLOW}")
    run(python, "-m", "pip", "install", *wanted, cwd=tmp_path, PYTHONPATH="")
    checked = run(python, "-m", "pip", "check", cwd=tmp_path, PYTHONPATH="")
    assert "No broken requirements" in checked
    program = """
import tensorflow as tf
from collective.ops import native_library
print(native_library.library().collective_bounds([tf.constant([7, -5], tf.int64)]).numpy())
"""
    printed = run(python, "-c", program, cwd=tmp_path, PYTHONPATH="")
    assert printed.splitlines()[-1] == "[[-5  7]]"


@pytest.fixture(scope="module")
def released(package_index: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs `make wheel`'s script in a copy of the checkout; it tries the wheel by itself."""
    copy = copy_checkout(tmp_path_factory.mktemp("released") / "checkout")
    (copy / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "wheel.sh", copy / "tools")
    choices = {"PYTHON": sys.executable, "FOR": TENSORFLOW}
    printed = run(copy / "tools" / "wheel.sh", cwd=copy, **choices)
    (wheel,) = (copy / "dist").iterdir()
    assert f"wheel: done: dist/{wheel.name}." in printed
    return wheel


@pytest.mark.long  # a minute: set-up and pip's wheels for another version of glibc
@pytest.mark.timeout(1800)
def test_a_released_wheel_holds_the_compiled_operations_for_many_linuxes(
    released: Path, tmp_path: Path
):
    assert re.search(r"-cp39-abi3-manylinux_2_\d+_x86_64(\.|$)", released.stem)
    with zipfile.ZipFile(released) as archive:
        libraries = [name for name in archive.namelist() if ".so" in name]
        assert sorted(Path(name).name for name in libraries) == sorted(LIBRARIES)
        archive.extractall(tmp_path)
    for name in libraries:
        dynamic = run("readelf", "-d", tmp_path / name, cwd=tmp_path)
        assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
