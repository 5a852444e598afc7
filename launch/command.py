"""From what stands behind the launcher's options to the command that each rank runs."""

from __future__ import annotations

import importlib.machinery
import os
import re
import sys
from collections.abc import Sequence

from .usage import UsageError

_INTERPRETER = re.compile(r"python(\d+(\.\d+)?)?")
_TAKE_A_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})


def rank_command(words: Sequence[str]) -> tuple[str, ...]:
    """The command line of a rank.

    Args:
      words: `script.py args`, `-m module args`, or either after a Python interpreter. A bare
        `python` or `python3` is the launcher's own; another one, by version or path, is taken at
        its word.

    Raises:
      UsageError: there is nothing to run, or it isn't there.
    """
    if not words:
        raise UsageError(
            "no script given: python -m collective.launch [options] script.py [arguments]"
        )
    first = words[0]
    if _INTERPRETER.fullmatch(os.path.basename(first)) and not (
        os.path.isfile(first) and _is_script(first)
    ):
        _check_program(words[1:], first)
        return (sys.executable if first in ("python", "python3") else first, *words[1:])
    _check_program(words, "")
    return (sys.executable, *words)


def _is_script(path: str) -> bool:
    """Is a file called `python` after all what should be run, not who runs it?"""
    return not os.access(path, os.X_OK)


def _check_program(words: Sequence[str], interpreter: str) -> None:
    """Says what isn't there in one sentence, before every rank says it with a traceback."""
    todo = list(words)
    while interpreter and todo and todo[0].startswith("-") and todo[0] not in ("-m", "-c"):
        del todo[: 2 if todo[0] in _TAKE_A_VALUE else 1]
    if not todo:
        raise UsageError(f"{interpreter} is given no script to run")
    if todo[0] in ("-m", "-c"):
        what = "module" if todo[0] == "-m" else "code"
        if len(todo) < 2:
            raise UsageError(f"{todo[0]} needs a {what} to run")
        if (
            todo[0] == "-m"
            and interpreter in ("", "python", "python3")
            and not _has_module(todo[1])
        ):
            raise UsageError(
                f"there is no module {todo[1]} (looked in the current folder and Python's path)"
            )
    elif not os.path.exists(todo[0]):
        raise UsageError(f"there is no script {todo[0]} (seen from {os.getcwd()})")


def _has_module(name: str) -> bool:
    """Could `python -m name` find it? Looks for the outermost package only: nothing is imported
    here.
    """
    top = name.partition(".")[0]
    if top in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(
        top, [os.getcwd()]
    ):
        return True
    return any(finder.find_spec(top, None) for finder in sys.meta_path)
