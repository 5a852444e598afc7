"""Tells failures of checkpoint storage from other errors, and how much room the storage has.

Storage fails in ways that training can survive: a disk is full, a folder is gone or may not be
written, a network file system accepts no more.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator

import tensorflow.compat.v1 as tf

# Error numbers that mean a storage failure. Other errors of the system mean a faulty program.
_ERRNOS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS),
        *(errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV),
        *(errno.ENXIO, errno.ENOTCONN, errno.ECONNRESET, errno.ECONNREFUSED, errno.EHOSTDOWN),
        *(errno.ENETDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EAGAIN, errno.EBUSY),
        *(errno.EMFILE, errno.ENFILE, errno.EREMOTEIO, errno.ENOTEMPTY),
    }
)


# Failures that more room wouldn't fix, in the words of `described`.
_NOT_OF_ROOM = re.compile(
    r"PermissionError|PermissionDeniedError|FileNotFoundError|NotFoundError|NotADirectoryError"
    r"|Read-only file system|Operation not permitted|\bis gone\b"
)


class StorageFailure(OSError):
    """Says that the storage failed; the original error is the cause."""


class CheckpointStorageError(OSError):
    """Says, on every rank alike, that a checkpoint was not written because its storage failed.

    The message says what failed on which rank, how many bytes the checkpoint needs and are free if
    that may be the reason, and which checkpoint is the latest. The session goes on, and the next
    save tries again.
    """


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Converts every TensorFlow error inside to a `StorageFailure`: only files are used there.

    Python's errors that mean a storage failure are known by their numbers (`is_failure`).
    """
    try:
        yield
    except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):
        raise  # A faulty program, or a missing file system.
    except tf.errors.OpError as error:
        raise StorageFailure(f"{type(error).__name__}: {error.message}") from error


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Converts errors that TensorFlow's sessions take for a preemption to a `StorageFailure`.

    Otherwise one rank would start again on its own, and the others wouldn't.
    """
    try:
        yield
    except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
        raise StorageFailure(f"{type(error).__name__}: {error.message}") from error


def is_failure(error: BaseException) -> bool:
    """Tells whether an error during a save is a storage failure."""
    return isinstance(error, (StorageFailure, CheckpointStorageError)) or (
        isinstance(error, OSError) and error.errno in _ERRNOS
    )


def described(error: BaseException, rank: int) -> str:
    """Returns the text of a failure, with the rank and host that saw it."""
    name = "" if isinstance(error, StorageFailure) else f"{type(error).__name__}: "
    return f"rank {rank} on host {socket.gethostname()}: {name}{error}"


def may_lack_room(words: Iterable[str]) -> bool:
    """Tells whether one of several failures (`described`) may mean that the storage is full."""
    return not all(_NOT_OF_ROOM.search(each) for each in words)


def free_bytes(folder: str) -> int | None:
    """Returns how many bytes are free in a folder, or in its nearest parent that exists.

    None if the system doesn't say, such as for a remote file system.
    """
    if "://" in folder:
        return None
    folder = os.path.abspath(folder or ".")
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def amount(size: int | None) -> str:
    """Returns a number of bytes as text, as exact as a file's size."""
    return "an unknown number of bytes" if size is None else f"{size:,} bytes"
