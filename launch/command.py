"""The command that each rank runs, made of the words behind the launcher's options."""

from __future__ import annotations

import importlib.machinery
import os
import re
import shutil
import sys
from collections.abc import Sequence

from .errors import UsageError

# The frameworks whose scripts run as they are: modules of collective.compat.
FRAMEWORKS = ("deeprec", "hybridbackend", "horovod", "sok")
_INTERPRETER = re.compile(r"python(\d+(\.\d+)?)?")
_INTERPRETER_OPTIONS_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
# Of the launcher's options; others are as likely to be a script's own.
_UNMISTAKABLE_OPTIONS = frozenset({"--dry-run", "--stall-timeout", "--nproc-per-node", "--tee"})
_MOST_SOURCE_READ = 1 << 20


def rank_command(words: Sequence[str], no_python: bool = False) -> tuple[str, ...]:
    """Returns the command line of a rank.

    Args:
      words: `script.py args`, `-m module args`, or either after a Python interpreter. A bare
        `python` or `python3` is the launcher's own; another one, by version or path, is taken at
        its word.
      no_python: the words are any program and its arguments.

    Raises:
      UsageError: there is nothing to run, or it isn't there.
    """
    if not words:
        raise UsageError(
            "no script given: python -m collective.launch [options] script.py [arguments]"
        )
    if no_python:
        return _program_command(words)
    if is_interpreter(words[0]):
        _check_program(words[1:], words[0])
        own = words[0] in ("python", "python3")
        return (sys.executable if own else words[0], *words[1:])
    _check_program(words, "")
    return (sys.executable, *words)


def misplaced_option(words: Sequence[str]) -> str:
    """Returns a note on an option of the launcher's that stands behind a script; "" for none.

    All that stands there is the script's. A script whose source has the word means it.
    """
    scripts = [number for number, word in enumerate(words) if word.endswith(".py")]
    arguments = words[scripts[0] + 1 :] if scripts else ()
    found = [word for word in arguments if word in _UNMISTAKABLE_OPTIONS]
    if not found:
        return ""
    script = words[scripts[0]]
    try:
        with open(script, encoding="utf-8", errors="replace") as file:
            source = file.read(_MOST_SOURCE_READ)
    except OSError:
        return ""
    if found[0] in source or found[0].strip("-").replace("-", "_") in source:
        return ""
    return f"{found[0]} stands behind {script}, so it is the script's; options come before it"


def as_framework(command: Sequence[str], framework: str, embedding_scope: str) -> tuple[str, ...]:
    """Returns the command line of a rank that runs a script of another framework.

    Args:
      command: the rank's command, of `rank_command`.
      framework: its name, of FRAMEWORKS.
      embedding_scope: "script" or "auto".

    Raises:
      UsageError: the command runs no script and no module in Python.
    """
    if not is_interpreter(command[0]):
        raise UsageError("--as is for Python scripts: it and --no-python contradict")
    position = 1
    while command[position].startswith("-") and command[position] not in ("-m", "-c"):
        position += 2 if command[position] in _INTERPRETER_OPTIONS_WITH_VALUE else 1
    if command[position] == "-c":
        raise UsageError("--as runs a script or a module: put the code behind -c into a file")
    runner = ("-m", "collective.run_script", "--as", framework)
    scope = ("--embedding-scope", embedding_scope, "--")
    return (*command[:position], *runner, *scope, *command[position:])


def _program_command(words: Sequence[str]) -> tuple[str, ...]:
    if words[0] == "-m":
        raise UsageError("--no-python and -m contradict: a module is run by Python")
    if shutil.which(words[0]) is None:
        raise UsageError(f"there is no program {words[0]} that can be executed (seen from PATH)")
    return tuple(words)


def is_interpreter(word: str) -> bool:
    """Tells an interpreter from a script that is called `python`, which can't be executed."""
    is_script = os.path.isfile(word) and not os.access(word, os.X_OK)
    return bool(_INTERPRETER.fullmatch(os.path.basename(word))) and not is_script


def _check_program(words: Sequence[str], interpreter: str) -> None:
    """Says in one sentence what isn't there, before every rank says it with a traceback."""
    program = list(words)
    while interpreter and program and program[0].startswith("-") and program[0] not in ("-m", "-c"):
        del program[: 2 if program[0] in _INTERPRETER_OPTIONS_WITH_VALUE else 1]
    if not program:
        raise UsageError(f"{interpreter} is given no script to run")
    kind = program[0]
    if kind in ("-m", "-c"):
        if len(program) < 2:
            raise UsageError(f"{kind} needs a {'module' if kind == '-m' else 'code'} to run")
        own_path = interpreter in ("", "python", "python3")
        if kind == "-m" and own_path and not _has_module(program[1]):
            raise UsageError(
                f"there is no module {program[1]} (looked in the current folder and Python's path)"
            )
    elif not os.path.exists(program[0]):
        raise UsageError(f"there is no script {program[0]} (seen from {os.getcwd()})")


def _has_module(name: str) -> bool:
    """Tells whether `python -m name` may find it, by the outermost package: it imports nothing."""
    top = name.partition(".")[0]
    if top in sys.builtin_module_names:
        return True
    if importlib.machinery.PathFinder.find_spec(top, [os.getcwd()]):
        return True
    return any(finder.find_spec(top, None) for finder in sys.meta_path)
