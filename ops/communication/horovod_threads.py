"""Makes Horovod's threads yield to a training step if they carry no part of it.

Horovod's background thread wakes up every HOROVOD_CYCLE_TIME ms and asks all ranks, by sockets,
whether there is something to do. Each time it would push aside the thread that computes. Where
every core computes and the step's collectives go through shared memory, that costs more than the
step's own waiting: by a third with the cycle of 0.1 ms that scripts set for Horovod's sake.

As batch work (sched(7): SCHED_BATCH) a thread that wakes up doesn't interrupt another one. It still
has its share of a core, and all of one that nobody else wants. Threads are known by their name,
which they inherit: those of a Horovod that the script itself has started stay as they are.
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
    with contextlib.suppress(OSError):  # Where there is no such name, they stay as they are.
        name = own.read_bytes()
        own.write_text(NAME)
    try:
        with training_apart.starting_horovod():
            initialise()
    finally:
        with contextlib.suppress(OSError):
            own.write_bytes(name)


def yield_processors() -> None:
    """Lets Horovod's threads interrupt none that computes."""
    _change(os.SCHED_OTHER, os.SCHED_BATCH)


def compete() -> None:
    """Lets Horovod's threads interrupt others again: a step goes by them."""
    _change(os.SCHED_BATCH, os.SCHED_OTHER)


def _change(policy: int, to: int) -> None:
    for task in _TASKS.glob("*"):
        try:
            thread = int(task.name)
            named = (task / "comm").read_text().strip() == NAME
            if named and os.sched_getscheduler(thread) == policy:
                os.sched_setscheduler(thread, to, os.sched_param(0))
        except OSError:
            continue  # It has ended, or may not be changed: a matter of speed alone.
