"""Reads a Dockerfile: its stages, and their instructions in order.

It knows as much of the language as docker/Dockerfile uses, and refuses the rest.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

_KEYWORDS = frozenset(
    "ARG CMD COPY ENTRYPOINT ENV FROM HEALTHCHECK LABEL RUN SHELL USER WORKDIR".split()
)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True)
class Instruction:
    """Holds one instruction.

    Attributes:
      keyword: its first word, in capitals.
      flags: the `--name=value` words after it.
      text: the rest, in one line.
      line: its number in the file.
    """

    keyword: str
    flags: tuple[tuple[str, str], ...]
    text: str
    line: int

    def exec_form(self) -> list[str] | None:
        """Returns the words of the form ["program", "argument"]; None of any other."""
        return json.loads(self.text) if self.text.startswith("[") else None

    def flag(self, name: str) -> str | None:
        return dict(self.flags).get(name)

    def mounts(self) -> list[dict[str, str]]:
        """Returns the options of each --mount of a RUN; one without a value is ""."""
        mounts = []
        for name, value in self.flags:
            if name == "mount":
                mounts.append(dict(option.partition("=")[::2] for option in value.split(",")))
        return mounts

    def pairs(self) -> dict[str, str]:
        """Returns the names and values of an ENV, LABEL or ARG; an ARG without one has ""."""
        return dict(word.partition("=")[::2] for word in shlex.split(self.text))


@dataclass
class Stage:
    """Holds a stage: from `FROM parent AS name` to the next FROM."""

    name: str
    parent: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, keyword: str) -> list[Instruction]:
        return [one for one in self.instructions if one.keyword == keyword]


@dataclass
class Dockerfile:
    """Holds the arguments before the first FROM with their defaults, and the stages by name."""

    arguments: dict[str, str]
    stages: dict[str, Stage]

    def lineage(self, name: str) -> list[Stage]:
        """Returns a stage and what it comes from, the outermost parent first."""
        stage = self.stages[name]
        above = self.lineage(stage.parent) if stage.parent in self.stages else []
        return [*above, stage]

    def last(self, name: str, keyword: str) -> Instruction:
        """Returns the instruction of a kind that holds for a stage: its own or its parent's.

        Raises:
          LookupError: there is none.
        """
        for stage in reversed(self.lineage(name)):
            if stage.all(keyword):
                return stage.all(keyword)[-1]
        raise LookupError(f"no {keyword} in stage {name}, nor in a stage that it comes from")


def read(text: str) -> Dockerfile:
    """Reads a Dockerfile.

    Raises:
      ValueError: it has something in it that this reader does not know.
    """
    result = Dockerfile({}, {})
    stage: Stage | None = None
    for instruction in _instructions(text):
        if instruction.keyword == "FROM":
            parent, word, name = instruction.text.split()
            if word.upper() != "AS" or instruction.flags:
                raise ValueError(f"line {instruction.line}: a stage needs a name")
            stage = Stage(name, expand(parent, result.arguments))
            result.stages[name] = stage
        elif stage is not None:
            stage.instructions.append(instruction)
        elif instruction.keyword == "ARG":
            result.arguments.update(instruction.pairs())
        else:
            raise ValueError(f"line {instruction.line}: {instruction.keyword} before any FROM")
    return result


def expand(text: str, values: Mapping[str, str]) -> str:
    """Puts values in the place of $NAME and ${NAME}; of a name without one nothing."""
    return _VARIABLE.sub(lambda match: values.get(match[1] or match[2], ""), text)


def _instructions(text: str) -> list[Instruction]:
    found = []
    pending, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (line.strip() or pending):
            continue
        first = first if pending else number
        if line.endswith("\\"):
            pending += line[:-1].strip() + " "
            continue
        found.append(_instruction(pending + line.strip(), first))
        pending = ""
    if pending:
        raise ValueError(f"line {first}: the instruction has no end")
    return found


def _instruction(text: str, line: int) -> Instruction:
    keyword, _, rest = text.partition(" ")
    if keyword.upper() not in _KEYWORDS:
        raise ValueError(f"line {line}: {keyword} is not known here")
    flags = []
    rest = rest.strip()
    while rest.startswith("--"):
        word, _, rest = rest.partition(" ")
        name, _, value = word[2:].partition("=")
        flags.append((name, value))
        rest = rest.strip()
    return Instruction(keyword.upper(), tuple(flags), rest, line)
