"""Runs pieces of Python on each rank of a launch, as they come, in one namespace.

Each rank reads a line of JSON from a pipe of its own, {"code", "name"}, and answers by a line,
{"output", "error"}. It ends when the pipe does.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import sys
import traceback
from pathlib import Path

import collective


def run(code: str, name: str, names: dict[str, object]) -> dict[str, str]:
    """Runs a piece and returns what it printed, and the error if there is one."""
    output, error = io.StringIO(), ""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    with contextlib.redirect_stdout(output):
        try:
            exec(compile(code, name, "exec"), names)
        except BaseException:
            error = traceback.format_exc()
    return {"output": output.getvalue(), "error": error}


def main(folder: Path) -> None:
    rank = collective.CollectiveStrategy().rank()
    # Functions of scripts say where they were defined: in a module that can be found.
    names = vars(sys.modules["__main__"])
    with open(folder / f"asked.{rank}") as asked, open(folder / f"told.{rank}", "w") as told:
        for line in asked:
            print(json.dumps(run(**json.loads(line), names=names)), file=told, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
