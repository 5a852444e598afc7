"""Runs an unchanged script of another framework; `collective launch --as` starts it.

python -m collective.run_script --as deeprec [--embedding-scope auto] script.py [arguments]

A script of TensorFlow 1 gets TensorFlow's version 1, and opens scope() where its framework has one.
For a script of TensorFlow 2 (of Horovod, SparseOperationKit, distributed-embeddings, TensorFlow
Recommenders Addons), scope() is open from its first line on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from collective.compat import script_files, script_version
from collective.compat.framework import say_once
from collective.compat.names.distributed_embeddings import DISTRIBUTED_EMBEDDINGS
from collective.compat.names.horovod import HOROVOD
from collective.compat.names.tfra import TFRA
from collective.compat.script_modules import INSTALLATION
from collective.job import training_apart
from collective.scope import SCOPES

# The frameworks all of whose scripts are of TensorFlow 2.
_OF_VERSION_2 = {each.name: each for each in (DISTRIBUTED_EMBEDDINGS, TFRA)}


def main(arguments: Sequence[str]) -> None:
    """Runs the script, in this process, as `__main__`."""
    training_apart.allow()  # Its framework decides how such a script trains on several ranks.
    options, command = _parse(arguments)
    if _is_of_version_2(options.framework, command):
        INSTALLATION.use_version_2()
        say_once(f"{' '.join(command[:1])} is a script of TensorFlow 2, and trains in scope()")
    if options.framework in _OF_VERSION_2:
        INSTALLATION.add(_OF_VERSION_2[options.framework], HOROVOD)
    else:
        importlib.import_module(f"collective.compat.{options.framework}")
    script_files.install()
    sys.argv = command[1:] if command[0] == "-m" else command
    with contextlib.ExitStack() as scopes:
        if options.embedding_scope == "auto":
            _open_scopes(scopes)
        elif INSTALLATION.has_version_2:
            _open_scope(scopes)
        elif command[0] != "-m":
            _warn_without_scope(command[0])
        if command[0] == "-m":
            sys.path.insert(0, os.getcwd())
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
            runpy.run_path(command[0], run_name="__main__")


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m collective.run_script", allow_abbrev=False)
    parser.add_argument("--as", dest="framework", required=True)
    parser.add_argument("--embedding-scope", choices=("script", "auto"), default="script")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    return options, command


def _is_of_version_2(framework: str, command: Sequence[str]) -> bool:
    """Tells whether the script or module is one of TensorFlow 2; not if it can't be read."""
    if framework in _OF_VERSION_2:
        return True
    if framework not in ("horovod", "sok"):
        return False  # The others' names are those of TensorFlow 1.
    path = Path(command[0])
    folder = path.parent
    if command[0] == "-m":
        with contextlib.suppress(ImportError, ValueError):
            found = importlib.util.find_spec(command[1])
            path, folder = Path((found and found.origin) or ""), Path.cwd()
    if not path.is_file():
        return False
    # SparseOperationKit's variables need no step, but in TensorFlow 1 always a session.
    unless_1 = framework == "sok"
    text = path.read_text("utf-8-sig", "replace")
    return script_version.is_2(text, folder, unless_1, path.parent)


def _open_scope(scopes: contextlib.ExitStack) -> None:
    """Opens scope() around the whole script, unless its framework has opened it."""
    from collective.strategy import CollectiveStrategy
    from collective.wrappers import keras_metrics

    if INSTALLATION.has_version_2:
        keras_metrics.keep_own_results()  # Such a script makes one of them itself.
    if not SCOPES.is_open:
        scopes.enter_context(CollectiveStrategy().scope())


def _open_scopes(scopes: contextlib.ExitStack) -> None:
    """Opens scope() around the whole script, and has its embeddings become tables."""
    _open_scope(scopes)
    SCOPES.enter_embedding({"chosen": True})
    scopes.callback(SCOPES.leave_embedding)


def _warn_without_scope(script: str) -> None:
    """Warns on several ranks that a script doesn't distribute itself, as far as its text shows."""
    folder = Path(script).resolve().parent
    files = [Path(script), *folder.glob("*.py"), *folder.glob("*/*.py")]
    words = [word for framework in INSTALLATION.frameworks for word in framework.marks]
    marks = re.compile("|".join(map(re.escape, (*words, "collective"))))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not any(
        marks.search(file.read_text(errors="replace")) for file in files if file.is_file()
    ):
        say_once(
            f"{script} opens no strategy.scope(), so that each of {os.environ['WORLD_SIZE']} ranks "
            "trains a model of its own. Start it with --embedding-scope auto to train one model."
        )


if __name__ == "__main__":
    main(sys.argv[1:])
