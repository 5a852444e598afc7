"""Says in words which races a search has found."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections import Counter
from pathlib import Path

MOST = 8  # that are told

# Has every emulated device of a process search, those of ranks, too.
WANTED = "COLLECTIVE_TEST_RACES"


def wanted() -> bool:
    return os.environ.get(WANTED, "") not in ("", "0")


def found(library: ctypes.CDLL, path: Path) -> list[str]:
    """Returns the races of the last launch of a library's kernels, the most frequent first."""
    library.races_found.restype = ctypes.c_char_p
    counts: Counter[str] = Counter()
    for line in library.races_found().decode().splitlines()[: 4 * MOST]:
        what, memory, whose, first_kind, first, second_kind, second, count = line.split("\t")
        counts[
            f"{what} by two {whose} in {memory} memory: {first_kind} at {_place(path, first)}, "
            f"{second_kind} at {_place(path, second)}"
        ] += int(count)
    return [f"{text}, {count} times" for text, count in counts.most_common(MOST)]


def _place(path: Path, code: str) -> str:
    """Returns the lines of the source that led to an access, the innermost first.

    Args:
        code: where the access goes on.
    """
    before = hex(int(code, 16) - 1)
    said = subprocess.run(
        ["addr2line", "-i", "-e", str(path), before], check=True, capture_output=True, text=True
    ).stdout
    lines = [os.path.basename(line.split(" ")[0]) for line in said.splitlines()]
    return " < ".join([line for line in lines if not line.startswith("cuda_")] or lines)
