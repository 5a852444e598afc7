"""Makes sure that a process has stdin, stdout and stderr."""

from __future__ import annotations

import os
import sys


def open_standard_streams() -> None:
    """Opens stdin, stdout or stderr if it is closed; else a rank's pipe would get its number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the kernel gives the lowest free number: this one
            os.set_inheritable(descriptor, True)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)
