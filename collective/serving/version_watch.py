"""Follows the versions of a SavedModel in a folder, for Python programs that serve it."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from collective.serving.versions import problem_of, versions_in


class VersionWatch:
    """Follows a folder of versions; `collective.serving.watch` makes it.

    Iterating over it yields the paths of new versions as they appear: always the newest complete
    one, so some may be skipped. It waits in between. `latest()` doesn't wait. In a `with` statement
    it is closed at the end. One thread uses it; any may close it.

    Args:
        folder: the folder.
        interval: seconds between two checks of the folder.
        timeout: seconds after which waiting for one version ends the iteration; None: never.
    """

    def __init__(self, folder: str, interval: float, timeout: float | None):
        self.folder, self._interval, self._timeout = folder, interval, timeout
        self._closed = threading.Event()
        self._given: tuple[int, str] | None = None
        self._warned: set[str] = set()

    def latest(self) -> str | None:
        """Returns the path of the newest complete version, without waiting; None if there is none.

        The iteration goes on with versions that come later.
        """
        newest = self._newest_complete()
        if newest is None:
            return None
        self._given = newest
        return newest[1]

    def close(self) -> None:
        """Ends the iteration, also one that waits in another thread."""
        self._closed.set()

    def __enter__(self) -> VersionWatch:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """Waits for the next version, and returns its path."""
        began = time.monotonic()
        while not self._closed.is_set():
            newest = self._newest_complete(self._given)
            if newest is not None:
                self._given = newest
                return newest[1]
            pause = self._interval
            if self._timeout is not None:
                pause = min(pause, began + self._timeout - time.monotonic())
                if pause <= 0:
                    break
            self._closed.wait(pause)
        raise StopIteration

    def _newest_complete(self, given: tuple[int, str] | None = None) -> tuple[int, str] | None:
        """Returns (number, path) of the newest complete version; None if there is none.

        It must be newer than the one that was given, as long as that one is there.
        """
        try:
            versions = versions_in(self.folder)
        except tf.errors.OpError as error:
            self._warn_once(self.folder, f"can't be read now: {error.message}")
            return None
        is_there = given in versions
        for version in versions:
            if given is not None and is_there and version[0] <= given[0]:
                return None
            problem = problem_of(version[1])
            if problem is None:
                return version
            self._warn_once(version[1], f"isn't complete: {problem}")
        return None

    def _warn_once(self, path: str, problem: str) -> None:
        if path in self._warned:
            return
        self._warned.add(path)
        warnings.warn(
            f"'{path}' {problem.rstrip('.')}. It is skipped, and checked again later; until "
            "then the previous version stays.",
            RuntimeWarning,
            stacklevel=4,
        )


def watch(folder: Any, interval: float, timeout: float | None) -> VersionWatch:
    """Makes a watch; see `collective.serving.watch`."""
    if isinstance(interval, bool) or not isinstance(interval, (int, float)) or not interval > 0:
        raise ValueError(f"interval={interval!r}: it must be a number of seconds above 0, as in 5.")
    if timeout is not None and (not isinstance(timeout, (int, float)) or not timeout >= 0):
        raise ValueError(
            f"timeout={timeout!r}: it must be a number of seconds, or None to wait forever."
        )
    return VersionWatch(tf.compat.as_str(os.fspath(folder)), interval, timeout)
