"""Makes the launcher's signals something to wait for together with pipes (the "self-pipe trick").

The kernel interrupts a process at any point; Python then writes the signal's number into a pipe. An
event loop that waits for that pipe sees the signals between other events, and can't miss one
between looking and waiting.
"""

from __future__ import annotations

import os
import select
import signal
import time

_ALWAYS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def stop_signals(preempt_signal: int) -> tuple[signal.Signals, ...]:
    """Returns the signals that tell a launcher to stop its job; the user may choose one of them."""
    return tuple(dict.fromkeys((*_ALWAYS, signal.Signals(preempt_signal))))


class SignalPipe:
    """Owns the pipe. Any thread may write into it to wake the loop."""

    def __init__(self, stop_signals: tuple[signal.Signals, ...]) -> None:
        """Handles the signals from now on.

        Args:
            stop_signals: the signals that tell the launcher to stop.
        """
        self.stop_signals = stop_signals
        self.descriptor, self._writing_end = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writing_end, False)
        for signum in (*stop_signals, signal.SIGCHLD):
            # nohup also protects the launcher from HUP. INT and QUIT are handled even if a shell
            # without job control ignores them for background jobs: a user who sends them to the
            # launcher means it.
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, lambda *_: None)
        signal.set_wakeup_fd(self._writing_end, warn_on_full_buffer=False)

    def wake(self) -> None:
        try:
            os.write(self._writing_end, b"\0")
        except BlockingIOError:
            pass  # full: the loop will wake anyway

    def take(self) -> list[signal.Signals]:
        """Returns the signals that have arrived since the last call."""
        try:
            numbers = os.read(self.descriptor, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number]

    def wait(self, seconds: float) -> signal.Signals | None:
        """Waits for a stop signal; returns None if none arrives within `seconds`."""
        end = time.monotonic() + seconds
        while True:
            for signum in self.take():
                if signum in self.stop_signals:
                    return signum
            left = end - time.monotonic()
            if left <= 0:
                return None
            select.select([self.descriptor], [], [], left)
