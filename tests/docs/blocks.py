"""Reads the blocks of code of a page, and what the page tells the tests about them.

A block is fenced, and says its language. Comments, which no reader sees, say the rest:

    <!-- docs: file train.py -->            the next block is saved, not run
    <!-- docs: not run: it needs a GPU -->  the next block isn't run, for this reason
    <!-- docs: raises Preempted -->         the next block ends with this error
    <!-- docs: python                       code that the page leaves out, between two blocks
    strategy = CollectiveStrategy()
    -->
    <!-- docs: sh                           the same for commands
    touch empty
    -->
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

RUN = ("python", "sh")

_PIECE = re.compile(
    r"^ *<!-- docs: (?P<comment>.*?)-->$"
    r"|^ *```(?P<language>[^\n]*)\n(?P<code>.*?)^ *```$"
    r"|(?<=\n\n)(?P<indented> {4,}\S.*)$",
    re.MULTILINE | re.DOTALL,
)


class PageError(Exception):
    """A page that can't be run as it is written."""


@dataclass(frozen=True)
class Block:
    """Describes a block of a page, in the page's order.

    Attributes:
        kind: "python" and "sh" are run, a "file" is saved, "text" is what the block before it
            prints, "left out" is not run.
        code: what stands in it.
        line: of the page, where its code begins.
        note: the name of a file; why a block isn't run; the name of an error that Python raises.
    """

    kind: str
    code: str
    line: int
    note: str = ""


def read(text: str) -> list[Block]:
    """Returns the blocks of a page.

    Raises:
        PageError: a block has no language, or another one than "python", "sh" and "text" and
            nothing says what to do with it.
    """
    return list(_read(text))


def _read(text: str) -> Iterator[Block]:
    said = ""
    for piece in _PIECE.finditer(text):
        line = text.count("\n", 0, piece.start()) + 2
        if piece["indented"] is not None:
            raise PageError(f"line {line - 1}: an indented block: fence it, with its language")
        if piece["comment"] is not None:
            if said:
                raise PageError(f"line {line - 1}: no block follows '{said}'")
            kind, _, code = piece["comment"].partition("\n")
            if kind.strip() in RUN:
                yield Block(kind.strip(), textwrap.dedent(code), line)
            else:
                said = piece["comment"].strip()
            continue
        yield _fenced(
            piece["language"], textwrap.dedent(piece["code"]), line, " ".join(said.split())
        )
        said = ""
    if said:
        raise PageError(f"no block follows '{said}'")


def _fenced(language: str, code: str, line: int, said: str) -> Block:
    word, _, rest = said.partition(" ")
    if said.startswith("not run: "):
        return Block("left out", code, line, said[len("not run: ") :])
    if word == "file" and rest:
        return Block("file", code, line, rest)
    if word == "raises" and rest and language == "python":
        return Block("python", code, line, rest)
    if said:
        raise PageError(f"line {line}: nobody knows what '{said}' means")
    if language not in (*RUN, "text"):
        raise PageError(
            f"line {line}: a block in '{language}' is neither run nor saved, and no reason is given"
        )
    return Block(language, code, line)


def missing_output(claimed: str, output: str) -> list[str]:
    """Returns the lines that a page says are printed, and which aren't, in their order.

    Spaces don't count, and "…" stands for anything.
    """
    printed = [" ".join(line.split()) for line in output.splitlines()]
    missing, place = [], 0
    for line in claimed.splitlines():
        if not line.strip(" …"):
            continue
        pattern = re.compile(re.escape(" ".join(line.split())).replace("…", ".*"))
        places = [k for k in range(place, len(printed)) if pattern.fullmatch(printed[k])]
        if places:
            place = places[0] + 1
        else:
            missing.append(line)
    return missing
