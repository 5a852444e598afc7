"""Runs the checks of kernel families side by side, each family in a process of its own.

NumPy's references take most of the time of a check, on one core each. A process that a fault of the
GPU ends takes no other family along.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

_LOOK_EVERY = 0.05  # seconds


class Running(NamedTuple):
    """Holds the checks of one family that run, and where their output goes."""

    family: str
    process: subprocess.Popen[bytes]
    output: Path
    since: float


def check(
    families: Sequence[str], most: int, arguments: Sequence[str], program: Sequence[str] = ()
) -> int:
    """Runs the families' checks, at most so many at once; returns how many families failed.

    What a family said is printed once it has ended; of those that this process doesn't live to see
    the end of (TERM, Ctrl-C), which are ended with it, what they said so far.

    Args:
        families: their names.
        most: how many run at once.
        arguments: of gpu_check, in addition to the family.
        program: what runs them; `collective gpu-check` without it.
    """
    command = [*(program or (sys.executable, "-u", "-m", "collective.ops.gpu_check"))]
    waiting, running, failed = list(families), list[Running](), 0
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder, _ended_by_term():
        try:
            while waiting or running:
                while waiting and len(running) < most:
                    family = waiting.pop(0)
                    output = Path(folder) / family
                    with output.open("wb") as file:
                        started = subprocess.Popen(
                            [*command, "--family", family, *arguments],
                            stdin=subprocess.DEVNULL,
                            stdout=file,
                            stderr=subprocess.STDOUT,
                        )
                    running.append(Running(family, started, output, time.monotonic()))
                ended = [one for one in running if one.process.poll() is not None]
                for one in ended:
                    running.remove(one)
                    failed += one.process.returncode != 0
                    _report(one, _ending(one.process.returncode))
                if not ended:
                    time.sleep(_LOOK_EVERY)
        finally:
            for one in running:
                one.process.kill()
                one.process.wait()
                _report(one, "ended before it was done")
    return failed


def _report(one: Running, ending: str) -> None:
    said = one.output.read_text(encoding="utf-8", errors="replace")
    seconds = time.monotonic() - one.since
    print(f"---- {one.family}: {ending} ({seconds:.0f} s)\n{said}", end="", flush=True)


def _ending(code: int) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"failed with exit code {code}" if code else "ok"


@contextmanager
def _ended_by_term() -> Iterator[None]:
    """Lets TERM (from timeout(1), for example) end this process by way of its `finally`."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
