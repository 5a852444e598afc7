"""The wheel and the source distribution hold every module once, under the names that a checkout
has; a wheel also the compiled key map.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUBPACKAGES = ("launch", "strategies", "ops")
DATA = (".cu", ".cuh", ".cc", ".h")


def run(*command: object, cwd: Path, **environment: str) -> str:
    finished = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


def build_wheel(source: Path, target: Path) -> Path:
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        source,
        "--no-deps",
        "--no-build-isolation",
        "-w",
        target,
        cwd=target,
    )
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, since a build leaves folders behind; a kernel is added where there is none yet."""
    copy = tmp_path_factory.mktemp("source") / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in ("collective", *SUBPACKAGES):
        shutil.copytree(
            ROOT / folder,
            copy / folder,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", "*.so"),
        )
    (copy / "ops" / "packaging_probe.cu").write_text("// kernel\n")
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(checkout, tmp_path_factory.mktemp("wheel"))


def package_files(wheel: Path) -> list[str]:
    return sorted(name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name)


def files_of(checkout: Path) -> list[str]:
    """What a wheel must hold: each file of the four folders where `import` looks for it."""
    found = ["collective/py.typed"]
    for directory, _, files in os.walk(checkout / "collective"):  # links not followed
        found += [
            str((Path(directory) / file).relative_to(checkout))
            for file in files
            if file.endswith(".py")
        ]
    for folder in SUBPACKAGES:
        found += [
            f"collective/{file.relative_to(checkout)}"
            for file in (checkout / folder).rglob("*")
            if file.suffix in (".py", *DATA)
        ]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return sorted([*found, f"collective/ops/_keymap{suffix}", f"collective/ops/_native{suffix}"])


def test_the_wheel_holds_every_module_once(checkout: Path, wheel: Path):
    assert package_files(wheel) == files_of(checkout)


def test_the_wheel_names_its_licence_and_does_not_require_horovod(wheel: Path):
    archive = zipfile.ZipFile(wheel)
    names = {name.rpartition("/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
    metadata = archive.read(names["METADATA"]).decode()
    assert "License: Apache-2.0" in metadata.splitlines()
    assert archive.read(names["LICENSE"]) == (ROOT / "LICENSE").read_bytes()
    assert (
        "horovod"
        not in " ".join(
            line for line in metadata.splitlines() if line.startswith("Requires-Dist")
        ).lower()
    )
    assert archive.read(names["top_level.txt"]).split() == [b"collective"]


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
    run(
        sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, wheel, cwd=tmp_path
    )
    program = (
        "import collective.launch, collective.ops.keymap; assert "
        "len(collective.ops.keymap.KeyMap(9)) == 0; "
        "print(collective.launch.__file__)"
    )
    printed = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(target))
    assert Path(printed.strip()) == target / "collective" / "launch" / "__init__.py"
    run(sys.executable, "-m", "collective.launch", "--help", cwd=tmp_path, PYTHONPATH=str(target))
    for folder in SUBPACKAGES:
        assert not (target / folder).exists()
