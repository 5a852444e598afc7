"""Processes as the kernel sees them: who descends from whom, and who adopts an orphan.

An orphan goes to the nearest ancestor that declared itself a *subreaper*. Below a subreaper nothing
gets lost, however often it forks or changes its session: walking the parents in ``/proc`` finds it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections import defaultdict
from collections.abc import Collection

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def adopt_orphans() -> None:
    """Makes this process the subreaper of everything that will descend from it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when `parent`, which must be its parent, is gone."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the kernel knew: no signal will come
        os.kill(os.getpid(), signal.SIGKILL)


def rename(title: str) -> None:
    """Overwrites this process's command line, as `ps` and `pkill -f` see it, with (the start of)
    `title`.
    """
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end in proc(5)
    if 0 < start < end:
        ctypes.memmove(
            start, title.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start
        )


def children() -> dict[int, list[int]]:
    """Every process that has children: parent -> children."""
    family: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stat:
                    # The command's name, in parentheses, may itself hold spaces and parentheses.
                    parent = int(stat.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it ended meanwhile
            family[parent].append(int(name))
    return family


def descendants(root: int, spare: Collection[int] = ()) -> list[int]:
    """Every process below `root`, but not those in `spare` nor what is below them."""
    family = children()
    found: list[int] = []
    todo = [root]
    while todo:
        below = [pid for pid in family.get(todo.pop(), ()) if pid not in spare]
        found += below
        todo += below
    return found


def signal_descendants(signum: int, spare: Collection[int] = ()) -> None:
    """Sends `signum` to everything below this process."""
    for pid in descendants(os.getpid(), spare):
        try:
            os.kill(pid, signum)
        except (ProcessLookupError, PermissionError):
            pass  # gone meanwhile; or it has become another user's, and nobody but root can end it


def reap() -> list[tuple[int, int]]:
    """Collects the children that have ended: (pid, exit code or minus the signal)."""
    ended = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
        ended.append(
            (pid, os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status))
        )
    return ended


def kill_descendants(patience: float, spare: Collection[int] = ()) -> list[int]:
    """Kills everything below this process, a subreaper, and returns what is left after `patience`
    seconds.

    One pass isn't enough: a process can fork while it is looked for. What it leaves behind comes to
    the subreaper, so the next pass finds it.
    """
    deadline = time.monotonic() + patience
    while True:
        signal_descendants(signal.SIGKILL, spare)
        reap()
        left = descendants(os.getpid(), spare)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)
