"""The launcher's signals as something to wait for together with pipes (the "self-pipe trick").

The kernel interrupts a process wherever it is; Python then puts the signal's number into a pipe. An
event loop that waits for that pipe sees signals between two other events, and none gets lost
between looking and waiting.
"""

from __future__ import annotations

import os
import select
import signal
import time

_ALWAYS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def stop_signals(preempt_signal: int) -> tuple[signal.Signals, ...]:
    """Returns the signals that tell a launcher to stop its job; one of them the user may choose."""
    return tuple(dict.fromkeys((*_ALWAYS, signal.Signals(preempt_signal))))


class SignalPipe:
    """Owns the pipe. Anybody, also another thread, may write into it to wake the loop."""

    def __init__(self, stop_signals: tuple[signal.Signals, ...]) -> None:
        """Takes the signals from now on.

        Args:
          stop_signals: those that tell the launcher to stop.
        """
        self.stop_signals = stop_signals
        self.descriptor, self._writing_end = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writing_end, False)
        for signum in (*stop_signals, signal.SIGCHLD):
            # nohup's promise holds for the launcher, too. INT and QUIT are taken even where a shell
            # without job control ignores them for background jobs: who sends them to the launcher
            # means it.
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, lambda *_: None)
        signal.set_wakeup_fd(self._writing_end, warn_on_full_buffer=False)

    def wake(self) -> None:
        try:
            os.write(self._writing_end, b"\0")
        except BlockingIOError:
            pass  # full: it will wake anyhow

    def take(self) -> list[signal.Signals]:
        """Takes the signals that have come since the last call."""
        try:
            numbers = os.read(self.descriptor, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number]

    def wait(self, seconds: float) -> signal.Signals | None:
        """Waits for a signal that tells to stop; returns None if none comes in so many seconds."""
        end = time.monotonic() + seconds
        while True:
            for signum in self.take():
                if signum in self.stop_signals:
                    return signum
            left = end - time.monotonic()
            if left <= 0:
                return None
            select.select([self.descriptor], [], [], left)
