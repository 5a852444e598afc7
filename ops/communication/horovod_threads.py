"""Makes Horovod's threads yield to a training step if they carry no part of it.

Horovod's background thread wakes up every HOROVOD_CYCLE_TIME ms and asks all ranks over sockets
whether there is something to do. Each time it interrupts a thread that computes. If every core
computes, and the step's collectives go through shared memory, that costs more than the step's own
waiting: by a third, with the cycle of 0.1 ms that scripts set for Horovod.

A thread that is marked as batch work (sched(7): SCHED_BATCH) doesn't interrupt another thread when
it wakes up. It still gets its share of a core, and all of a core that is idle. Threads are known by
a name that they inherit; the threads of a Horovod that the script itself has started don't have it,
and stay as they are.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from collective.job import training_apart

NAME = "horovod"
_TASKS = Path("/proc/self/task")


def start(initialise: Callable[[], object]) -> None:
    """Runs `initialise`; the threads that it starts have Horovod's name."""
    own, name = _TASKS / str(threading.get_native_id()) / "comm", b""
    with contextlib.suppress(OSError):  # If threads can't be named, they stay as they are.
        name = own.read_bytes()
        own.write_text(NAME)
    try:
        with training_apart.starting_horovod():
            initialise()
    finally:
        with contextlib.suppress(OSError):
            own.write_bytes(name)


def yield_processors() -> None:
    """Keeps Horovod's threads from interrupting threads that compute."""
    _change(os.SCHED_OTHER, os.SCHED_BATCH)


def compete() -> None:
    """Lets Horovod's threads interrupt others again: a step depends on them."""
    _change(os.SCHED_BATCH, os.SCHED_OTHER)


def _change(policy: int, to: int) -> None:
    for task in _TASKS.glob("*"):
        try:
            thread = int(task.name)
            named = (task / "comm").read_text().strip() == NAME
            if named and os.sched_getscheduler(thread) == policy:
                os.sched_setscheduler(thread, to, os.sched_param(0))
        except OSError:
            continue  # It has ended, or may not be changed: that only affects speed.
