"""Writing to a terminal, pipe or file that may be slow, without making the launcher wait.

A pager that nobody scrolls or a terminal stopped with Ctrl-S blocks whoever writes to it. A thread
does that here, so that the launcher still sees ranks die and signals come. What waits to be written
is bounded by its callers: they stop reading from the ranks while it is `congested`, as a full pipe
would stop the ranks themselves.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

_CONGESTED = 1 << 20
_PIECE = 1 << 16


class Writer:
    """Writes to one descriptor in a thread, in order."""

    def __init__(self, descriptor: int, notify: Callable[[], None]):
        """`notify` is called from the thread when something was written, or never can be again."""
        self.broken: OSError | None = None
        self._descriptor = descriptor
        self._notify = notify
        self._waiting = bytearray()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name=f"writer of {descriptor}", daemon=True).start()

    def write(self, data: bytes) -> None:
        """Queues `data`; after a failure, drops it."""
        with self._changed:
            if self.broken is None:
                self._waiting += data
                self._changed.notify()

    @property
    def congested(self) -> bool:
        return len(self._waiting) > _CONGESTED

    @property
    def idle(self) -> bool:
        return not self._waiting

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                piece = bytes(self._waiting[:_PIECE])
            try:
                written = os.write(self._descriptor, piece)
            except BlockingIOError:  # somebody made it non-blocking; it is theirs as much as ours
                _wait_until_writable(self._descriptor)
                continue
            except OSError as error:
                with self._changed:
                    self.broken = error
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
