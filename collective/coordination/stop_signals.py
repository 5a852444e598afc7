"""Receives the signals that tell a rank to stop, wherever the program is.

Python calls a signal's handler between two steps of the main thread's program, which may take long:
the thread may wait in TensorFlow for data or for other ranks. So a separate thread waits for the
signals, through the pipe into which Python writes their numbers at once (`signal.set_wakeup_fd`).

    the first one                 is noted, for later questions
    the same within SAME seconds  is the same: a scheduler signals launcher and ranks
    TERM again, under Slurm       is the same: it comes by several ways, and KILL by itself
    another one, later            ends the process at once, as it does without this library
    any, once the launcher ends   the same
    the job

A script's own signal handlers are kept, whether it installs them before or later.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from typing import Any

from collective.coordination import milestones
from collective.job.preempt_signals import VARIABLE, signal_number
from collective.job.schedulers import ends_jobs_itself

SAME = 2.0  # seconds in which signals count as one

_DEFAULTS = {signal.SIGINT: (signal.default_int_handler,)}


class StopSignals:
    """Notes the first stop signal of this process.

    Attributes:
        received: SIGINT, or SIGTERM for any other; 0 while there was none.
    """

    def __init__(self) -> None:
        self.received = 0
        self._since = 0.0
        self._is_watching = False
        self._installed: list[int] = []
        self._pipe: tuple[int, int] | None = None
        self._listener: threading.Thread | None = None
        # Always the same object, by which a watched signal is recognised.
        self._handler = self._handle

    def watch(self) -> None:
        """Begins to note signals; only the main thread can."""
        if self._is_watching or threading.current_thread() is not threading.main_thread():
            return
        self._is_watching = True
        wanted = [number for number in _stop_signals() if _is_untouched(number)]
        if not wanted:
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        others = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if others != -1:
            # The script's event loop needs it. The handler then runs when Python gets to it.
            signal.set_wakeup_fd(others)
            os.close(reading)
            os.close(writing)
        else:
            self._pipe = reading, writing
            self._listener = threading.Thread(
                target=self._listen, args=(reading,), name="stop signals", daemon=True
            )
            self._listener.start()
        for number in wanted:
            signal.signal(number, self._handler)
        self._installed = wanted
        _forget_in_forks(self)

    def unwatch(self, unheard: bool) -> None:
        """Restores the previous state.

        Args:
            unheard: whether a noted signal ends the process now.
        """
        if not self._is_watching or threading.current_thread() is not threading.main_thread():
            return
        self._restore()
        if self._pipe is not None:
            reading, writing = self._pipe
            self._pipe = None
            os.write(writing, b"\0")
            os.close(writing)
        if self._listener is not None:
            self._listener.join()
            self._listener = None
        if self.received and unheard:
            signal.raise_signal(self.received)

    def forget(self) -> None:
        """Restores the previous state in a fork of the process, which isn't a rank."""
        if self._is_watching:
            with contextlib.suppress(ValueError):
                self._restore()
        self._pipe, self._listener, self.received = None, None, 0

    def _restore(self) -> None:
        for number in self._installed:
            if signal.getsignal(number) is self._handler:
                signal.signal(number, _DEFAULTS.get(signal.Signals(number), (signal.SIG_DFL,))[0])
        if self._pipe is not None:
            others = signal.set_wakeup_fd(-1)
            if others != self._pipe[1]:
                signal.set_wakeup_fd(others)
        self._installed, self._is_watching = [], False

    def _handle(self, number: int, frame: Any) -> None:
        if self._pipe is None:
            self._note(number)

    def _listen(self, reading: int) -> None:
        while True:
            numbers = os.read(reading, 64)
            for number in numbers:
                if number and signal.getsignal(number) is self._handler:
                    self._note(number)
            if not numbers or 0 in numbers:
                os.close(reading)
                return

    def _note(self, number: int) -> None:
        now = time.monotonic()
        is_same = now - self._since <= SAME or (
            number == self.received == signal.SIGTERM and ends_jobs_itself(os.environ)
        )
        if milestones.poster().is_ending or self.received and not is_same:
            _end_at_once(number)
        elif not self.received:
            self._since = now
            self.received = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM


def _stop_signals() -> list[int]:
    """Returns the signals that tell this process to stop.

    Under the launcher, Ctrl-C is the launcher's; otherwise it interrupts, as always.
    """
    numbers = [int(signal.SIGTERM)]
    chosen = os.environ.get(VARIABLE)
    if chosen:
        try:
            numbers.append(signal_number(chosen))
        except ValueError as error:
            raise ValueError(
                f"{VARIABLE}={chosen}: {error}; give a name like USR1, or a number"
            ) from None
    if os.environ.get("COLLECTIVE_LAUNCHED"):
        numbers.append(int(signal.SIGINT))
    return sorted(set(numbers))


def _is_untouched(number: int) -> bool:
    """Tells whether a signal has its default effect."""
    defaults = _DEFAULTS.get(signal.Signals(number), (signal.SIG_DFL,))
    return signal.getsignal(number) in defaults


def _end_at_once(number: int) -> None:
    """Ends the process by the signal, from any thread, whatever the main thread is in."""
    ctypes.CDLL(None).signal(number, None)  # SIG_DFL is 0
    os.kill(os.getpid(), number)


_watched: list[StopSignals] = []
_forking = threading.local()


def _before_fork() -> None:
    """Holds back signals: a signal for a child would be noted here until the child is separate."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _stop_signals())


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    for signals in _watched:
        signals.forget()
    _after_fork()


def _forget_in_forks(signals: StopSignals) -> None:
    if not _watched:
        os.register_at_fork(
            before=_before_fork,
            after_in_parent=_after_fork,
            after_in_child=_after_fork_in_child,
        )
    if signals not in _watched:
        _watched.append(signals)
