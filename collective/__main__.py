"""The commands of this package: `collective COMMAND`, or `python -m collective COMMAND`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from collective.version import __version__

_HELP = """\
usage: collective [--help | --version] COMMAND [ARGUMENTS]

Trains recommendation models with TensorFlow on several ranks, their embedding tables sharded.

Commands
{commands}

`collective COMMAND --help` is the manual of a command. `python -m collective` is the same as
`collective`, with the interpreter of your choice.

Examples
  collective check
  collective launch -np 2 train.py --epochs 3
  collective checkpoint show model_dir
"""


class Command(NamedTuple):
    """Describes a command.

    Attributes:
        name: the word on the command line.
        module: the module whose `main(arguments, prog)` runs it; it is imported only then.
        summary: what the command does.
    """

    name: str
    module: str
    summary: str


COMMANDS = (
    Command(
        "launch",
        "collective.launch.__main__",
        "start the ranks of a script, and watch over them",
    ),
    Command(
        "check", "collective.launch.check.diagnostics", "say what is installed and what is missing"
    ),
    Command(
        "plan",
        "collective.plan.__main__",
        "choose placements of tables and predict a step, without machines",
    ),
    Command(
        "checkpoint",
        "collective.checkpoint.__main__",
        "show, consolidate and verify checkpoints; import another framework's",
    ),
    Command(
        "serve",
        "collective.inference.server.__main__",
        "answer with a model over HTTP, by TensorFlow Serving's REST form",
    ),
    Command("data", "collective.data.__main__", "convert Criteo's click logs to Parquet"),
    Command(
        "report",
        "collective.profiling.report.__main__",
        "draw where the time of profiled steps went",
    ),
    Command(
        "build-horovod",
        "collective.build_horovod",
        "build Horovod against the installed TensorFlow, and install it",
    ),
    Command("gpu-check", "collective.ops.gpu_check", "check and time the kernels on a GPU"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        print(_help(), end="", file=sys.stderr)
        return 2
    name, *rest = words
    if name in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0
    if name == "--version":
        print(f"collective {__version__}")
        return 0
    for command in COMMANDS:
        if command.name == name:
            module = importlib.import_module(command.module)
            return int(module.main(rest, prog=f"collective {name}"))
    print(f"collective: {_unknown(name)}", file=sys.stderr)
    return 2


def _help() -> str:
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS]
    return _HELP.format(commands="\n".join(lines))


def _unknown(name: str) -> str:
    import difflib

    names = [command.name for command in COMMANDS]
    similar = difflib.get_close_matches(name, names, n=1)
    guess = f", perhaps you mean {similar[0]}" if similar else ""
    if name.endswith(".py"):
        guess = f"; to start a script: collective launch {name}"
    return f"there is no command {name}{guess}; the commands are {', '.join(names)}"


if __name__ == "__main__":
    sys.exit(main())
