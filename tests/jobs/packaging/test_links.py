"""A checkout whose links git has written as text files can't be imported, and says why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SUBPACKAGES = ("launch", "ops", "strategies")


@pytest.fixture
def checkout_without_links(tmp_path: Path) -> Path:
    """Copies the packages, with the links as git writes them where core.symlinks is false."""
    checkout = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.cu", "*.cuh", "native")
    for folder in ("collective", *SUBPACKAGES):
        shutil.copytree(ROOT / folder, checkout / folder, symlinks=True, ignore=ignored)
    for folder in SUBPACKAGES:
        link = checkout / "collective" / folder
        target = os.readlink(link)
        link.unlink()
        link.write_text(target)  # without an end of line
    return checkout


def run(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "arguments", [("-c", "import collective"), ("-m", "collective.launch", "--help")]
)
# -S: where no package is installed. Else an installed collective is found, and it is another's.
@pytest.mark.parametrize("site", [(), ("-S",)], ids=["installed", "not-installed"])
def test_an_import_says_what_happened_and_what_to_do(
    checkout_without_links: Path, arguments: tuple[str, ...], site: tuple[str, ...]
):
    finished = run(checkout_without_links, *site, *arguments)
    assert finished.returncode != 0
    assert "ImportError" in finished.stderr
    for words in (
        "text files instead of links",
        "core.symlinks=false",
        "git config core.symlinks true",
        "git checkout -- collective",
        "pip install .",
    ):
        assert words in finished.stderr


def test_an_editable_install_of_such_a_checkout_works(checkout_without_links: Path):
    """Setuptools then maps the folders themselves, as this finder does."""
    program = """
import importlib.util, sys

class EditableFinder:
    def find_spec(self, name, path=None, target=None):
        if name == "collective.launch":
            return importlib.util.spec_from_file_location(name, "launch/__init__.py")

sys.meta_path.append(EditableFinder())
import collective.launch
"""
    finished = run(checkout_without_links, "-S", "-c", program)
    assert finished.returncode == 0, finished.stderr
