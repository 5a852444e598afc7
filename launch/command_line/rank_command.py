"""The command that each rank runs, made from the words after the launcher's options."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import shlex
import shutil
import sys
import warnings
import zipfile
from collections.abc import Sequence

from collective.job.errors import UsageError

# The frameworks whose scripts run unchanged, each a module of collective.compat.
FRAMEWORKS = ("deeprec", "distributed-embeddings", "hybridbackend", "horovod", "sok", "tfra")
_INTERPRETER = re.compile(r"python(\d+(\.\d+)?)?")
_INTERPRETER_OPTIONS_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
# Options that only the launcher has; its other options might as well be a script's own.
_UNMISTAKABLE_OPTIONS = frozenset({"--dry-run", "--stall-timeout", "--nproc-per-node", "--tee"})
# Where a process finds its own open files, which another one doesn't have.
_DESCRIPTOR = re.compile(r"/dev/(stdin|fd/\d+)|/proc/[^/]+/fd/\d+")
_MOST_SOURCE_READ = 1 << 20


def rank_command(words: Sequence[str], no_python: bool = False) -> tuple[str, ...]:
    """Returns the command line of a rank.

    Args:
        words: `script.py args`, `-m module args`, or either after a Python interpreter. A bare
            `python` or `python3` means the launcher's own interpreter; one with a version or a path
            is used as given.
        no_python: the words are any program and its arguments.

    Raises:
        UsageError: there is nothing to run, or the program doesn't exist.
    """
    if not words:
        raise UsageError("no script given: collective launch [options] script.py [arguments]")
    if no_python:
        return _program_command(words)
    if is_interpreter(words[0]):
        _check_program(words[1:], words[0])
        own = words[0] in ("python", "python3")
        return (sys.executable if own else words[0], *words[1:])
    _check_program(words, "")
    return (sys.executable, *words)


def loader_command(script: str) -> tuple[str, ...]:
    """Returns the command line of a loader.

    Args:
        script: the second value of --data-loaders: a script, or a text with arguments.

    Raises:
        UsageError: it is no such text, or the script doesn't exist.
    """
    words = loader_words(script)
    try:
        return rank_command(words)
    except UsageError as error:
        raise UsageError(f"--data-loaders: {error}") from None


def loader_words(script: str) -> list[str]:
    """Returns the words of the second value of --data-loaders, without a bare interpreter.

    Raises:
        UsageError: it can't be split into words, or has none.
    """
    try:
        words = [script] if os.path.exists(script) else shlex.split(script)
    except ValueError as error:
        raise UsageError(f"--data-loaders: {script!r}: {error}") from None
    if words[:1] in (["python"], ["python3"]):
        words = words[1:]
    if not words:
        raise UsageError(f"--data-loaders: {script!r} has no script")
    return words


def misplaced_option(words: Sequence[str]) -> str:
    """Returns a note about a launcher option that comes after the script; "" if there is none.

    All words after the script belong to the script. There is no note if its source has the word.
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
    return f"{found[0]} stands after {script}, so it is the script's; options come before it"


def as_framework(command: Sequence[str], framework: str, embedding_scope: str) -> tuple[str, ...]:
    """Returns the command line of a rank that runs a script of another framework.

    Args:
        command: the rank's command, as `rank_command` returns it.
        framework: the framework's name, one of FRAMEWORKS.
        embedding_scope: "script" or "auto".

    Raises:
        UsageError: the command doesn't run a Python script or module.
    """
    if not is_interpreter(command[0]):
        raise UsageError("--as is for Python scripts: it and --no-python contradict")
    position = 1
    while command[position].startswith("-") and command[position] not in ("-m", "-c"):
        position += 2 if command[position] in _INTERPRETER_OPTIONS_WITH_VALUE else 1
    if command[position] == "-c":
        raise UsageError("--as runs a script or a module: put the code after -c into a file")
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
    """Tells an interpreter from a script called `python`, which can't be executed."""
    is_script = os.path.isfile(word) and not os.access(word, os.X_OK)
    return bool(_INTERPRETER.fullmatch(os.path.basename(word))) and not is_script


def script_of(words: Sequence[str], no_python: bool = False) -> str:
    """Returns the path of the script or program that the words of `rank_command` run.

    The path is "" for a module, for code, and for a program that is found by PATH.
    """
    if not words:
        return ""
    if no_python:
        return words[0] if os.sep in words[0] else ""
    program = _without_options(words[1:]) if is_interpreter(words[0]) else list(words)
    return program[0] if program and program[0] not in ("-m", "-c") else ""


def check_is_kept(script: str) -> None:
    """Refuses a script that several ranks can't read: a pipe, or the launcher's standard input.

    Raises:
        UsageError: it is one.
    """
    is_own = _DESCRIPTOR.fullmatch(os.path.abspath(script)) is not None
    if script and os.path.exists(script) and (is_own or not _is_file_or_folder(script)):
        raise UsageError(
            f"{script} can be read only once, by the launcher itself, and not by each rank: put "
            "the script into a file"
        )


def _is_file_or_folder(path: str) -> bool:
    return os.path.isfile(path) or os.path.isdir(path)


def _without_options(words: Sequence[str]) -> list[str]:
    """Returns an interpreter's words without its options: the script or module comes first."""
    program = list(words)
    while program and program[0].startswith("-") and program[0] not in ("-m", "-c"):
        del program[: 2 if program[0] in _INTERPRETER_OPTIONS_WITH_VALUE else 1]
    return program


def _check_program(words: Sequence[str], interpreter: str) -> None:
    """Reports in one sentence what can't run, before every rank fails with a traceback."""
    program = _without_options(words) if interpreter else list(words)
    if not program:
        raise UsageError(f"{interpreter} is given no script to run")
    kind = program[0]
    own_interpreter = interpreter in ("", "python", "python3")
    if kind in ("-m", "-c"):
        if len(program) < 2:
            raise UsageError(f"{kind} needs a {'module' if kind == '-m' else 'code'} to run")
        if kind == "-m" and own_interpreter:
            _check_module(program[1])
    elif not os.path.exists(kind):
        raise UsageError(f"there is no script {kind} (seen from {_folder()})")
    elif own_interpreter:
        _check_file(kind)


def _folder() -> str:
    """Returns the current folder, or a note if it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "a folder that has been deleted"


def _check_module(name: str) -> None:
    """Looks for the module of `python -m name`, as Python does, but imports nothing."""
    top, *rest = name.split(".")
    if not rest and top in sys.builtin_module_names:
        return
    # Looks up the first part of the name: the whole name would need its packages imported.
    spec = importlib.machinery.PathFinder.find_spec(top, ["", *sys.path])
    if spec is None:
        specs = (finder.find_spec(top, None) for finder in sys.meta_path)
        spec = next((found for found in specs if found), None)
    where = "the current folder and Python's path"
    for part in [*rest, "__main__"]:
        if spec is None:
            raise UsageError(f"there is no module {name} (looked in {where})")
        if _may_make_modules(spec):
            return
        folders = spec.submodule_search_locations
        if folders is None:
            if part == "__main__":
                return
            raise UsageError(f"there is no module {name}: {spec.origin} isn't a package")
        where = ", ".join(folders)
        spec = importlib.machinery.PathFinder.find_spec(part, list(folders))
    if spec is None:
        raise UsageError(f"{name} is a package, and can't be run without __main__.py in {where}")


def _may_make_modules(parent: importlib.machinery.ModuleSpec) -> bool:
    """Tells whether a package may have modules that its folder doesn't show."""
    if parent.origin is None:  # a namespace package, whose parts may be elsewhere
        return True
    try:
        with open(parent.origin, "rb") as file:
            source = file.read(_MOST_SOURCE_READ)
    except OSError:  # it is in an archive
        return True
    return b"__path__" in source or b"sys.modules" in source


def _check_file(path: str) -> None:
    """Checks the path that Python is to run: a script, a folder, an archive or compiled code."""
    if os.path.isdir(path):
        script = os.path.join(path, "__main__.py")
        if os.path.isfile(script):
            _check_syntax(script)
        elif not os.path.isfile(f"{script}c"):
            raise UsageError(f"{path} is a folder, and can't be run without __main__.py in it")
    elif os.path.isfile(path) and not zipfile.is_zipfile(path):  # a pipe can be read only once
        _check_syntax(path)


def _check_syntax(script: str) -> None:
    """Compiles the source, whatever the file's extension."""
    try:
        with open(script, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source = file.read()
            if source.startswith(importlib.util.MAGIC_NUMBER):  # compiled already
                return
            if b"\0" in source:
                raise UsageError(f"{script} isn't a Python script: --no-python runs other programs")
            compile(source, script, "exec", dont_inherit=True)
    except SyntaxError as error:
        kind = type(error).__name__
        other = "" if script.endswith(".py") else "; --no-python runs what is no Python script"
        raise UsageError(f"{script}, line {error.lineno}: {kind}: {error.msg}{other}") from None
    except (OSError, ValueError):  # the rank reports it
        pass
