"""Runs the checks of kernel families in parallel, each family in a separate process.

NumPy's references take most of the time of a check, on one core each. If a fault of the GPU ends a
process, no other family is affected.
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
    """Holds the running checks of one family, and the file of their output."""

    family: str
    process: subprocess.Popen[bytes]
    output: Path
    since: float


def check(
    families: Sequence[str], most: int, arguments: Sequence[str], program: Sequence[str] = ()
) -> int:
    """Runs the families' checks, at most `most` at a time; returns how many families failed.

    A family's output is printed once it has ended. If this process ends first (TERM, Ctrl-C), it
    ends the running families, and prints their output so far.

    Args:
        families: their names.
        most: how many families run at a time.
        arguments: arguments for gpu_check, in addition to the family.
        program: the program that runs them; by default `collective gpu-check`.
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
    """Lets TERM (from timeout(1), for example) end this process through its `finally` blocks."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
