"""Runs `collective launch`; the package's docstring is its manual."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None, **called: str) -> int:
    """Runs the launcher and returns its exit code; see `cli.main`."""
    # Until there is a job, Ctrl-C ends the launcher as TERM does: there is nothing to undo.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from collective.launch.cli import main as run

    return run(arguments, **called)


if __name__ == "__main__":
    sys.exit(main())
