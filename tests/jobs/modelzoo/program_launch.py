"""Starts programs of modelzoo/ from this checkout, installed or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MODELZOO = ROOT / "modelzoo"
CENSUS_INCOME = MODELZOO / "census_income"
MOVIELENS = MODELZOO / "movielens"
NO_NETWORK = dict.fromkeys(
    ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"
)


def train(ranks: int, *options: object, **environment: str | None) -> subprocess.CompletedProcess:
    """Runs the census' train.py as `launch` runs a program."""
    return launch(CENSUS_INCOME / "train.py", ranks, *options, **environment)


def launch(
    program: Path, ranks: int, *options: object, **environment: str | None
) -> subprocess.CompletedProcess:
    """Runs a program on some ranks, with these options and changes to the environment."""
    return subprocess.run(
        command(program, ranks, *options),
        cwd=ROOT,
        env=environ(**environment),
        timeout=200,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def command(program: Path, ranks: int, *options: object) -> list[str]:
    return [
        sys.executable,
        "-m",
        "collective.launch",
        "-np",
        str(ranks),
        "--device",
        "cpu",
        str(program),
        *map(str, options),
    ]


def alone(program: str | Path, *arguments: object) -> str:
    """Runs a program (a file, or its text) without this checkout; returns what it printed."""
    code = [str(program)] if isinstance(program, Path) else ["-c", program]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    completed = subprocess.run(
        [sys.executable, *code, *map(str, arguments)],
        cwd="/",
        timeout=100,
        text=True,
        env={**environment, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def environ(**changes: str | None) -> dict[str, str]:
    """Returns this process' environment with these changes, and with the checkout importable.

    A variable that is None is not set.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    changed = {**os.environ, "PYTHONPATH": path, **changes}
    return {name: value for name, value in changed.items() if value is not None}
