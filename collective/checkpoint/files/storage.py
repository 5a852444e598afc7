"""Tells failures of the storage of checkpoints from all others, and what the storage has room for.

Storage fails in ways that training needn't fail with: a disk is full, a folder is gone or may not
be written, a network's file system takes no more.
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

# What the system may say of storage. Other errors of the system are mistakes of a program.
_ERRNOS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS),
        *(errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV),
        *(errno.ENXIO, errno.ENOTCONN, errno.ECONNRESET, errno.ECONNREFUSED, errno.EHOSTDOWN),
        *(errno.ENETDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EAGAIN, errno.EBUSY),
        *(errno.EMFILE, errno.ENFILE, errno.EREMOTEIO, errno.ENOTEMPTY),
    }
)


# Failures that more room wouldn't mend, as `described` names them.
_NOT_OF_ROOM = re.compile(
    r"PermissionError|PermissionDeniedError|FileNotFoundError|NotFoundError|NotADirectoryError"
    r"|Read-only file system|Operation not permitted|\bis gone\b"
)


class StorageFailure(OSError):
    """Tells that the storage failed; the error that it gave is the cause."""


class CheckpointStorageError(OSError):
    """Tells that a checkpoint was not written since its storage failed, on every rank alike.

    The message says what failed on which rank, the bytes that the checkpoint needs and that are
    free, if that may be why, and which checkpoint is the latest. The session goes on, and the next
    save tries again.
    """


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Makes a `StorageFailure` of every error of TensorFlow's inside: there are only files there.

    Errors of Python's that are the storage's are known by their numbers (`is_failure`).
    """
    try:
        yield
    except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):
        raise  # A mistake of a program, or a file system that there isn't.
    except tf.errors.OpError as error:
        raise StorageFailure(f"{type(error).__name__}: {error.message}") from error


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Makes a `StorageFailure` of errors that TensorFlow's sessions take for a preemption.

    One rank would begin again on its own, and the others not.
    """
    try:
        yield
    except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
        raise StorageFailure(f"{type(error).__name__}: {error.message}") from error


def is_failure(error: BaseException) -> bool:
    """Tells whether an error that came while a checkpoint was made is one of its storage."""
    return isinstance(error, (StorageFailure, CheckpointStorageError)) or (
        isinstance(error, OSError) and error.errno in _ERRNOS
    )


def described(error: BaseException, rank: int) -> str:
    """Returns the words of a failure, with the rank and host that saw it."""
    name = "" if isinstance(error, StorageFailure) else f"{type(error).__name__}: "
    return f"rank {rank} on host {socket.gethostname()}: {name}{error}"


def may_lack_room(words: Iterable[str]) -> bool:
    """Tells whether one of several failures (`described`) may be that the storage is full."""
    return not all(_NOT_OF_ROOM.search(each) for each in words)


def free_bytes(folder: str) -> int | None:
    """Returns how many bytes a folder, or the nearest one above that is there, has room for.

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
    """Returns a number of bytes in words, exact as a file's size is."""
    return "an unknown number of bytes" if size is None else f"{size:,} bytes"
