"""A copy of the checkout, since a build leaves folders in what it builds."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SUBPACKAGES = ("launch", "strategies", "ops")


def copy_checkout(target: Path) -> Path:
    """Copies what a build of the package reads to `target`, which doesn't exist yet."""
    target.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    for folder in ("collective", *SUBPACKAGES):
        shutil.copytree(ROOT / folder, target / folder, symlinks=True, ignore=ignored)
    return target


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Runs a command, which must succeed, and returns what it printed."""
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
