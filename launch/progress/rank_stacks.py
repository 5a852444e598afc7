"""The Python stack of a rank that others wait for; the launcher requests it with a signal.

    launcher ──signal──▶ rank: Python writes its stacks ──▶ unnamed memory
        ▲                                                          │
        └───────────────── reads it by /proc ──────────────────────┘

A process that isn't prepared for the signal (`collective.job.stack_signal`) doesn't get it, because
the signal's default action would end the process.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence

from collective.job.stack_signal import NAME, SIGNAL
from collective.launch.output.raised_error import is_of_script
from collective.launch.processes import process_tree

_PATIENCE = 1.0  # seconds in which a rank answers
_QUIET = 0.05  # after this long without another byte, an answer is complete
_MOST_BYTES = 1 << 16
_MOST_FRAMES = 8
_THREAD = re.compile(r"(?:Current thread|Thread) 0x")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def stack_of(rank: int) -> list[str]:
    """Asks a rank among this process's descendants for its stack.

    Returns:
        The frames of its main thread from the innermost one to the script's own line, which comes
        last; nothing if the rank doesn't answer.
    """
    for pid, path in _ranks(f"/memfd:{NAME}.{rank} "):
        with contextlib.suppress(OSError), open(path, "rb") as memory:
            if not _is_ready(pid):
                continue
            memory.seek(0, os.SEEK_END)
            os.kill(pid, SIGNAL)
            return frames(_read_answer(memory.fileno()))
    return []


def frames(text: str) -> list[str]:
    """Returns the frames of the main thread, which faulthandler writes last."""
    found: list[tuple[str, str]] = []
    for line in text.splitlines():
        frame = _FRAME.fullmatch(line)
        if frame:
            found.append((frame[1], f"{frame[1]}, line {frame[2]}, in {frame[3]}"))
        elif _THREAD.match(line):
            found = []
    own = [number for number, (file, _) in enumerate(found) if is_of_script(file)]
    places = [place for _, place in found[: own[0] + 1 if own else _MOST_FRAMES]]
    if len(places) > _MOST_FRAMES:
        places[_MOST_FRAMES - 2 : -1] = ["…"]
    return places


def _ranks(name: str) -> Iterator[tuple[int, str]]:
    """Yields the descendants that own memory with this name, and its place; oldest first."""
    children = process_tree.children_by_parent()
    generation: Sequence[int] = [os.getpid()]
    while generation:
        generation = [child for parent in generation for child in children.get(parent, ())]
        for pid in generation:
            with contextlib.suppress(OSError):
                for entry in os.scandir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        if os.readlink(entry.path).startswith(name):
                            yield pid, entry.path


def _is_ready(pid: int) -> bool:
    """Tells whether a process catches the signal, and isn't stopped."""
    with open(f"/proc/{pid}/status") as file:
        status = dict(line.split(":\t", 1) for line in file if ":\t" in line)
    caught = int(status["SigCgt"], 16) >> (SIGNAL - 1) & 1
    return bool(caught) and status["State"][0] not in "TtZX"


def _read_answer(memory: int) -> str:
    """Reads the answer from the descriptor's position until no more bytes arrive."""
    text = b""
    end = quiet = time.monotonic() + _PATIENCE
    while time.monotonic() < min(end, quiet) and len(text) < _MOST_BYTES:
        more = os.read(memory, _MOST_BYTES)
        if more:
            text += more
            quiet = time.monotonic() + _QUIET
        time.sleep(0.005)
    return text.decode("utf-8", "replace")
