"""Three top-level folders are sub-packages, imported by their full name only, in one direction."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUBPACKAGES = ("launch", "strategies", "ops")
PROGRAMS = ("tests", "modelzoo", "benchmarks", "docker", "docs", "tools")
MOST_LINES = 550


def modules(folder: str) -> Iterator[tuple[str, Path]]:
    """Yields the name and file of each module under a top-level folder, links not followed."""
    package = f"collective.{folder}" if folder in SUBPACKAGES else folder
    for directory, _, files in os.walk(ROOT / folder):
        inner = Path(directory).relative_to(ROOT / folder).parts
        for file in sorted(files):
            if file.endswith(".py"):
                yield ".".join((package, *inner, file[: -len(".py")])), Path(directory) / file


def imported(name: str, file: Path) -> set[str]:
    """Returns the full names that a module imports; `from package import it` is `package.it`."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = importlib.util.resolve_name(
                "." * node.level + (node.module or ""), name.rpartition(".")[0]
            )
            names |= {f"{package}.{alias.name}" for alias in node.names}
    return names


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("folder", SUBPACKAGES)
def test_the_package_holds_a_relative_link_to_the_top_level_folder(folder: str):
    assert os.readlink(ROOT / "collective" / folder) == f"../{folder}"
    assert (ROOT / folder / "__init__.py").is_file(), f"{folder}/ is no package"


@pytest.mark.parametrize("folder", ("collective", *SUBPACKAGES, *PROGRAMS))
def test_sub_packages_are_imported_by_their_full_name(folder: str):
    """A plain `import ops` loads the module a second time: two copies of its state."""
    plain = {
        str(file.relative_to(ROOT)): sorted(names)
        for name, file in modules(folder)
        if (names := {n for n in imported(name, file) if within(n, SUBPACKAGES)})
    }
    assert not plain, f"write collective.ops for ops, and so on: {plain}"


@pytest.mark.parametrize(
    "folder, allowed",
    [
        ("launch", ("collective.launch",)),
        ("ops", ("collective.ops",)),
        ("strategies", ("collective.strategies", "collective.ops")),
    ],
)
def test_imports_point_one_way(folder: str, allowed: tuple[str, ...]):
    upwards = {
        str(file.relative_to(ROOT)): sorted(names)
        for name, file in modules(folder)
        if (
            names := {
                n
                for n in imported(name, file)
                if within(n, ("collective",)) and not within(n, allowed)
            }
        )
    }
    assert not upwards, f"{folder}/ may import {' and '.join(allowed)} only: {upwards}"


@pytest.mark.parametrize("name", ["collective", "collective.launch", "collective.launch.__main__"])
def test_tensorflow_is_not_loaded_on_import(name: str):
    program = f'import sys, {name}; print(*sorted({{"tensorflow", "horovod"}} & set(sys.modules)))'
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert loaded.stdout.split() == []


@pytest.mark.parametrize("folder", ("collective", *SUBPACKAGES, "modelzoo", "benchmarks"))
def test_no_module_is_long(folder: str):
    lines = {
        str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines())
        for _, file in modules(folder)
    }
    assert not {file: count for file, count in lines.items() if count > MOST_LINES}
