"""Writes to a descriptor that may be slow, without making the launcher wait."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

_CONGESTED_BYTES = 1 << 20
_MOST_BYTES_A_WRITE = 1 << 16


class ThreadedWriter:
    """Writes to a descriptor that may be slow, without making the launcher wait.

    A pager that nobody scrolls or a terminal stopped with Ctrl-S blocks its writers. A
    thread does that here, so that the launcher still sees ranks die and signals come. The callers
    bound the bytes that wait: they stop reading from the ranks while it is `congested`, as a full
    pipe would stop the ranks themselves.

    Attributes:
        error: why nothing can be written any more.
    """

    def __init__(self, descriptor: int, notify: Callable[[], None]) -> None:
        """Starts the thread.

        Args:
            descriptor: where to write.
            notify: called from the thread when something was written, or never can be again.
        """
        self.error: OSError | None = None
        self._descriptor = descriptor
        self._notify = notify
        self._waiting = bytearray()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(
            target=self._run, name=f"writer of {descriptor}", daemon=True
        )
        self._thread.start()

    def write(self, data: bytes) -> None:
        """Queues `data`; after a failure, drops it."""
        with self._changed:
            if self.error is None:
                self._waiting += data
                self._changed.notify()

    def close(self) -> None:
        """Ends the thread. What waits must have been written."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    @property
    def congested(self) -> bool:
        return len(self._waiting) > _CONGESTED_BYTES

    @property
    def idle(self) -> bool:
        return not self._waiting

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closed:
                        return
                    self._changed.wait()
                piece = bytes(self._waiting[:_MOST_BYTES_A_WRITE])
            try:
                written = os.write(self._descriptor, piece)
            except BlockingIOError:  # another process that shares it made it non-blocking
                _wait_until_writable(self._descriptor)
                continue
            except OSError as error:
                with self._changed:
                    self.error = error
                    self._waiting.clear()
                self._notify()
                return
            with self._changed:
                del self._waiting[:written]
            self._notify()


def _wait_until_writable(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    poll.poll()
