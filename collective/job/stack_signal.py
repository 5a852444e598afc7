"""Prepares a rank for the signal with which the launcher requests its Python stacks.

Python's faulthandler writes the stacks from within the signal, whatever the rank is doing: it may
sleep, wait in a TensorFlow operation, or hold the interpreter. The launcher reads them from memory
that the rank holds under this name.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal

from collective.job.nameless_memory import nameless_file

SIGNAL = signal.SIGRTMIN + 11
NAME = "collective.stacks"
_memory: int | None = None  # of this process, if it is a rank that answers


def answer(rank: int) -> None:
    """Has this process, a rank, write its stacks whenever the launcher asks for them."""
    global _memory
    # A script that uses the signal itself keeps it.
    if _memory is not None or signal.getsignal(SIGNAL) != signal.SIG_DFL:
        return
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        memory = nameless_file(f"{NAME}.{rank}")
        faulthandler.register(SIGNAL, memory, all_threads=True)
        _memory = memory
