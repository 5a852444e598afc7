"""The signals with which a scheduler announces a preemption, by name or number."""

from __future__ import annotations

import signal

VARIABLE = "COLLECTIVE_PREEMPT_SIGNAL"  # tells the ranks which signal acts like TERM
# These can't be caught, or mean something else to a process.
_UNFIT = ("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGINT", "SIGSEGV", "SIGFPE", "SIGILL", "SIGBUS")


def signal_number(text: str) -> int:
    """Returns the number of a signal: "USR1", "SIGUSR1" or "10".

    Raises:
        ValueError: there is no such signal, or it can't be used as an announcement.
    """
    name = text.strip().upper()
    if name.isdigit():
        number = signal.Signals(int(name))
    else:
        try:
            number = signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
        except KeyError:
            raise ValueError(f"{text!r} is no signal") from None
    if number.name in _UNFIT:
        raise ValueError(f"{number.name} can't announce a preemption")
    return int(number)
