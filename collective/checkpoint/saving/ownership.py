"""Keeps two jobs from saving under one name: a saving job puts a mark next to its checkpoints.

    model.ckpt-100.index  …        the checkpoints
    model.ckpt.owner               the mark: which process on which host saves here

Rank 0 makes the mark at the first save of a session, and removes it when the session, or the last
scope(), is closed. In between a thread renews it every few seconds. A job that is about to save and
finds another job's mark checks whether that job is still alive:

    a process of this machine      it exists, or it doesn't
    any other process              it is alive if the mark is renewed during the check, and dead
                                   if the mark stays unchanged for `EXPIRY` seconds

The clocks of two hosts are never compared. A dead owner's mark is taken over. A living owner has
half a minute to end, as a preempted job does after its last checkpoint. If it stays alive, the save
is an error before anything is written: two jobs would delete each other's checkpoints, and take
each other's for their latest. A job that only restores makes no mark.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import functools
import json
import os
import secrets
import socket
import sys
import threading
import time
import warnings
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination.session_state import state_of_session

SUFFIX = ".owner"
RENEWAL = 5.0  # seconds between two renewals of a mark
EXPIRY = 60.0  # seconds without a renewal after which an unseen owner counts as dead
MOST_MARKS = 8  # for a session that always saves under new names
# A mark is overwritten in place, which takes no room on a disk that has become full.
_LENGTH = 1024
_INTERVAL = 0.25  # seconds between two checks of another job's mark
_PATIENCE = 30.0  # seconds for a living owner, which may be about to end
_SILENCE = 3.0  # seconds of waiting without a message
_SETTLING = 0.1  # seconds after which two processes that take over a mark see who has it
# The variables in which schedulers give a job its number.
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "JOB_ID")


class OwnedError(OSError):
    """Says that another job saves under the same name."""


@dataclasses.dataclass(frozen=True)
class Owner:
    """Describes the process that saves under a name.

    Attributes:
        id: identifies it.
        job: the scheduler's number of its job; '' if there is none.
        host: the host's name.
        machine: identifies the kernel that runs it and the processes visible there; '' if unknown.
        pid: the process's number.
        started: when the process started, by the kernel's count.
        since: when it made the mark, in UTC, as text.
        command: the program.
    """

    id: str
    job: str
    host: str
    machine: str
    pid: int
    started: str
    since: str
    command: str

    def __str__(self) -> str:
        job = f"job {self.job}, " if self.job else ""
        return f"{job}process {self.pid} on host {self.host} since {self.since}, {self.command}"

    def lives(self) -> bool | None:
        """Tells whether the owner lives; None if this process can't see it."""
        if not self.machine or self.machine != _machine():
            return None
        return _lives(self.pid, self.started)


@dataclasses.dataclass(frozen=True)
class Mark:
    """Holds the content of a mark at one moment.

    Attributes:
        text: the whole content.
        owner: the owner; None if it can't be read, for example while it is being written.
    """

    text: str
    owner: Owner | None


@dataclasses.dataclass(eq=False)
class Hold:
    """Represents one session's use of a mark; calling it ends the use.

    Attributes:
        marks: the marks of the process.
        path: the path of the mark.
    """

    marks: OwnerMarks
    path: str

    def __call__(self) -> None:
        self.marks.release(self)


class OwnerMarks:
    """Makes, renews and removes the marks of one process.

    Attributes:
        id: the id of the process as an owner.
    """

    def __init__(self) -> None:
        self.id, self._process = secrets.token_hex(8), os.getpid()
        self._holds: dict[str, set[Hold]] = {}  # by the path of the mark
        self._unreadable: set[str] = set()  # marks that exist but can't be read
        self._renewals = 0
        self._lock = threading.RLock()  # no thread reads a mark while it is written
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, session: Any, base: str) -> None:
        """Makes sure that this process owns the checkpoints called `base`.

        If no mark can be made, it continues with a warning: the save itself finds out whether
        something is wrong.

        Args:
            session: the session that saves. The mark stays until it, or the last scope, is closed.
            base: the checkpoints' path, without the number of a step. Its folder exists.

        Raises:
            OwnedError: another job owns them.
        """
        path, at_close = base + SUFFIX, state_of_session(session).at_close
        if path in self._unreadable:
            return
        try:
            self._take(path, base)
        except OwnedError:
            raise
        except (OSError, tf.errors.OpError) as error:
            _warn_unmarked(path, error)
            return
        with self._lock:
            if at_close.get(path) in self._holds.get(path, ()):
                return
        held = [name for name in at_close if name.endswith(SUFFIX)]
        if len(held) >= MOST_MARKS and path not in held:
            at_close.pop(held[0])()
        with self._lock:
            is_first = path not in self._holds
            hold = at_close[path] = Hold(self, path)
            self._holds.setdefault(path, set()).add(hold)
            if self._thread is None:
                self._start_renewing()
        # Last, because a filter may turn the warning into an error.
        if is_first:
            _warn_of_others(os.path.dirname(base), self.others_in(os.path.dirname(base)))

    def release(self, hold: Hold) -> None:
        """Removes a mark of this process, unless another session saves there."""
        # A fork of this process owns nothing.
        if self._process != os.getpid():
            return
        with self._lock:
            holds = self._holds.get(hold.path, set())
            if hold not in holds:
                return
            holds.remove(hold)
            if not holds:
                self._remove(hold.path)

    def release_sessions(self) -> None:
        """Removes all marks; a session that saves again makes its mark again."""
        if self._process != os.getpid():
            return
        with self._lock:
            for path in list(self._holds):
                self._remove(path)

    def release_all(self) -> None:
        """Removes all marks, at the end of the program."""
        if self._process != os.getpid():
            return
        self._is_over.set()
        self.release_sessions()
        if self._thread is not None:
            self._thread.join(timeout=_INTERVAL)

    def owns(self, mark: Mark | None) -> bool:
        """Tells whether a mark belongs to this process."""
        return mark is not None and mark.owner is not None and mark.owner.id == self.id

    def others_in(self, folder: str) -> list[Owner]:
        """Returns the owners of other processes' marks in `folder` that may be alive."""
        try:
            names = [name for name in tf.io.gfile.listdir(folder or ".") if name.endswith(SUFFIX)]
            found = [read(os.path.join(folder, name)) for name in sorted(names)]
        except (OSError, tf.errors.OpError):
            return []
        owners = [mark.owner for mark in found if mark is not None and mark.owner is not None]
        return [owner for owner in owners if owner.id != self.id and owner.lives() is not False]

    def _take(self, path: str, base: str) -> None:
        """Makes the mark, or takes it over from a dead owner.

        Raises:
            OwnedError: the owner is alive.
            OSError: no mark can be made, or an existing mark can't be read.
        """
        if self._create(path):
            return
        began = changed = time.monotonic()
        last, has_said = None, False
        while True:
            with self._lock:
                seen = read(path)
            if self.owns(seen) or seen is None and self._create(path):
                return
            now = time.monotonic()
            is_renewed = last is not None and seen is not None and seen != last
            if seen != last:
                last, changed = seen, now
            owner = None if seen is None else seen.owner
            lives = None if owner is None else owner.lives()
            is_expired = lives is None and now - changed > EXPIRY
            if seen is None and is_expired:
                self._unreadable.add(path)
                raise OSError(errno.EIO, "it is there, but can't be read", path)
            if seen is not None and (lives is False or is_expired):
                if self._replace(path, seen):
                    return
            elif now - began > _PATIENCE and (lives or is_renewed):
                raise OwnedError(_in_use(path, base, owner))
            elif now - began > _SILENCE and not has_said:
                has_said = True
                # An owner on another host may be killed at the end of its time.
                most = _PATIENCE if lives else _PATIENCE + EXPIRY
                _say_that_it_waits(path, owner, began + most - now)
            time.sleep(_INTERVAL)

    def _create(self, path: str) -> bool:
        """Makes a mark if there is none; returns whether it did."""
        with self._lock:
            if "://" in path:
                if tf.io.gfile.exists(path):
                    return False
                _overwrite(path, self._text())
                return True
            try:
                handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            except FileExistsError:
                return False
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(self._text())
            except OSError:
                with contextlib.suppress(OSError):
                    os.remove(path)
                raise
            return True

    def _replace(self, path: str, stale: Mark) -> bool:
        """Takes over a mark that is still as it was seen; returns whether it did."""
        with self._lock:
            if read(path) != stale:
                return False
            # It isn't overwritten: it may belong to another user.
            with contextlib.suppress(tf.errors.NotFoundError):
                tf.io.gfile.remove(path)
            if not self._create(path):
                return False
        # If two processes do so at the same moment, the last one has the mark.
        time.sleep(_SETTLING)
        with self._lock:
            return self.owns(read(path))

    def _remove(self, path: str) -> None:
        """Removes a mark of this process."""
        self._holds.pop(path, None)
        try:
            if self.owns(read(path)):
                tf.io.gfile.remove(path)
        except (OSError, tf.errors.OpError) as error:
            _warn_unremoved(path, error)

    def _start_renewing(self) -> None:
        atexit.register(self.release_all)
        self._thread = threading.Thread(
            target=self._renew_until_over, name="checkpoint owner", daemon=True
        )
        self._thread.start()

    def _renew_until_over(self) -> None:
        while not self._is_over.wait(RENEWAL):
            with self._lock:
                self._renewals += 1
                for path in self._holds:
                    # It may work the next time.
                    with contextlib.suppress(OSError, tf.errors.OpError):
                        if self.owns(read(path)):
                            _overwrite(path, self._text())

    def _text(self) -> str:
        record = {**dataclasses.asdict(this_process(self.id)), "renewals": self._renewals}
        return json.dumps(record).ljust(_LENGTH) + "\n"


_instances: dict[int, OwnerMarks] = {}


def marks() -> OwnerMarks:
    """Returns the marks of this process; a fork has its own."""
    if os.getpid() not in _instances:
        _instances.clear()
        _instances[os.getpid()] = OwnerMarks()
    return _instances[os.getpid()]


def read(path: str) -> Mark | None:
    """Reads a mark; None if there is none."""
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except tf.errors.NotFoundError:
        return None
    try:
        record = json.loads(text)
        owner = Owner(**{field.name: record[field.name] for field in dataclasses.fields(Owner)})
        return Mark(text, owner if isinstance(owner.pid, int) and owner.pid > 0 else None)
    except (ValueError, KeyError, TypeError):
        return Mark(text, None)


def _overwrite(path: str, text: str) -> None:
    if "://" in path:
        with tf.io.gfile.GFile(path, "w") as remote:
            remote.write(text)
        return
    with open(path, "r+", encoding="utf-8") as file:
        file.write(text)
        file.truncate()


@functools.cache
def this_process(identity: str) -> Owner:
    jobs = [os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name)]
    state = _process_state(os.getpid())
    return Owner(
        id=identity,
        job=jobs[0][:60] if jobs else "",
        host=socket.gethostname()[:100],
        machine="" if state is None else _machine(),
        pid=os.getpid(),
        started="" if state is None else state[1],
        since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        command=os.path.basename(sys.argv[0] or "python")[:100],
    )


@functools.cache
def _machine() -> str:
    """Returns what identifies this kernel and the processes visible on it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _lives(pid: int, started: str) -> bool | None:
    """Tells whether the process `pid` of this machine started then, and is alive.

    None if that can't be determined: another user's process may be hidden.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # It belongs to another user.
    state = _process_state(pid)
    return None if state is None else state[0] not in ("Z", "X") and state[1] == started


def _process_state(pid: int) -> tuple[str, str] | None:
    """Returns (state, start by the kernel's count) of a process; None if they can't be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may itself contain spaces and parentheses.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), fields[19].decode()


def _in_use(path: str, base: str, owner: Owner | None) -> str:
    return (
        f"another job saves its checkpoints as '{base}': {owner or 'which one can not be read'}. "
        "Two jobs would delete each other's, so this one has written nothing. Give it a folder of "
        f"its own, or end the other job first. (The mark is the file '{path}'. There is no need "
        "to delete it: a job that was killed is found out.)"
    )


def _say_that_it_waits(path: str, owner: Owner | None, seconds: float) -> None:
    until = time.strftime("%H:%M:%S UTC", time.gmtime(time.time() + seconds))
    tf.logging.warning(
        "'%s' says that another job saves here (%s). Waiting for it to end, until %s at the most. "
        "If it was killed on another host, that is known after %.0f s.",
        path,
        owner or "which one can't be read",
        until,
        EXPIRY,
    )


def _warn_of_others(folder: str, others: list[Owner]) -> None:
    if others:
        warnings.warn(
            f"another job saves in the folder '{folder}' under another name, or did until it was "
            f"killed: {others[0]}. Neither overwrites the other's checkpoints, but both write the "
            "file that names the latest one. Give each job a folder of its own.",
            RuntimeWarning,
            stacklevel=2,
        )


def _warn_unmarked(path: str, error: Exception) -> None:
    warnings.warn(
        f"'{path}' can't be written ({type(error).__name__}: {error}), so another job that saves "
        "under this name would not be noticed. Saving continues.",
        RuntimeWarning,
        stacklevel=2,
    )


def _warn_unremoved(path: str, error: Exception) -> None:
    warnings.warn(
        f"'{path}' can't be removed ({type(error).__name__}: {error}). A later job finds out by "
        "itself that this one is over, which may take it a minute.",
        RuntimeWarning,
        stacklevel=2,
    )
