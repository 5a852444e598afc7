"""Runs tests of compiled operations in another process, which checks more of what they do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
_PROGRAM = """
import sys, pytest
{first}
sys.exit(pytest.main(sys.argv[1:]))
"""


def run_tests(
    name: str, *options: str, first: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs all tests of a file.

    Args:
        name: of the file, as 'test_NAME.py'.
        options: for pytest.
        first: what the process does before.
        environment: variables that are set besides.
    """
    program = [sys.executable, "-X", "faulthandler", "-c", _PROGRAM.format(first=first)]
    chosen = ["-q", "-p", "no:cacheprovider", "--tier", "all", *options]
    return subprocess.run(
        [*program, *chosen, str(_FOLDER / f"test_{name}.py")],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
