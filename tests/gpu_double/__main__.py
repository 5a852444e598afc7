"""Runs a program on the double: see the package."""

from __future__ import annotations

import os
import runpy
import sys

from tests import gpu_double


def main() -> None:
    """Runs what the command line names, as Python itself would."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m tests.gpu_double SCRIPT|-m MODULE [ARGUMENT...]")
    gpu_double.use()
    if sys.argv[1] == "-m":
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
