"""Reads CUDA source files, as one text each."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Source:
    """Names one `.cu` file and the kernels that it defines, all `extern "C" __global__`.

    They have plain names and no template arguments, since CuPy compiles a module with template
    arguments again in every process.

    Attributes:
        file: its name in this folder.
        kernels: the names of its kernels.
    """

    file: str
    kernels: tuple[str, ...]

    def text(self) -> str:
        """Returns the file with its includes inserted, each once: CuPy's cache on disk identifies a
        module only by its text.
        """
        return _inlined(self.file, set())


def _inlined(name: str, seen: set[str]) -> str:
    seen.add(name)
    text = (FOLDER / name).read_text(encoding="utf-8")
    pieces, at = [f'#line 1 "{name}"\n'], 0
    for match in _INCLUDE.finditer(text):
        pieces.append(text[at : match.start()])
        if match[1] not in seen:
            pieces.append(_inlined(match[1], seen))
        pieces.append(f'#line {text.count(chr(10), 0, match.end()) + 2} "{name}"')
        at = match.end()
    return "".join([*pieces, text[at:]])
