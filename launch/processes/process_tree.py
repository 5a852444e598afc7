"""The process tree: finds descendants, adopts orphans, and ends all of them.

An orphan goes to the nearest ancestor that has declared itself a *subreaper*. Nothing gets lost
below a subreaper, however often it forks or changes its session: walking the parents in `/proc`
finds it.
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
    """Makes this process the subreaper of all its future descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent `parent` is gone."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call: no signal will come
        os.kill(os.getpid(), signal.SIGKILL)


def rename(title: str) -> None:
    """Overwrites this process's command line, as `ps` and `pkill -f` see it, with `title`.

    A title that is longer than the command line is cut.
    """
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end in proc(5)
    if 0 < start < end:
        words = title.encode()[: end - start - 1].ljust(end - start, b"\0")
        ctypes.memmove(start, words, end - start)


def children_by_parent() -> dict[int, list[int]]:
    """Returns the children of every process that has any."""
    children: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stat:
                    # The command's name, in parentheses, may itself contain spaces and parentheses.
                    parent = int(stat.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it has ended meanwhile
            children[parent].append(int(name))
    return children


def descendants(root: int, spare: Collection[int] = ()) -> list[int]:
    """Returns every process below `root`, but not those in `spare` nor any below them."""
    children = children_by_parent()
    below: list[int] = []
    parents = [root]
    while parents:
        pids = [pid for pid in children.get(parents.pop(), ()) if pid not in spare]
        below += pids
        parents += pids
    return below


def signal_descendants(signum: int, spare: Collection[int] = ()) -> None:
    """Sends `signum` to everything below this process."""
    for pid in descendants(os.getpid(), spare):
        try:
            os.kill(pid, signum)
        except (ProcessLookupError, PermissionError):
            pass  # it has ended; or it belongs to another user now, and only root can end it


def reap() -> list[tuple[int, int]]:
    """Collects the children that have ended: pid, and exit code or minus the signal."""
    ended = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        ended.append((pid, code))
    return ended


def kill_descendants(patience: float, spare: Collection[int] = ()) -> list[int]:
    """Kills everything below this process, a subreaper.

    One pass isn't enough: a process can fork during the search. Its orphan goes to the subreaper,
    so the next pass finds it.

    Args:
        patience: how many seconds to continue.
        spare: processes to leave alone, with all below them.

    Returns:
        The processes that are left.
    """
    deadline = time.monotonic() + patience
    while True:
        signal_descendants(signal.SIGKILL, spare)
        reap()
        left = descendants(os.getpid(), spare)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)
