"""Draws profiles that `scope(profile=…)` has saved: `collective report DIR [DIR]`."""

from __future__ import annotations

import argparse
import os
import sys

from collective.profiling.report.page import page
from collective.profiling.report.profile import load, write

EPILOG = """
DIR is the folder that scope(profile=DIR) was given, or its split.json. The page is one file: it
needs no network, runs no script, and can be sent to somebody. Two folders are shown side by side,
on the same scales, with the differences. To compare two settings, profile both on one machine.

exit codes: 0 the page is written; 1 there is no profile, or the page can't be written; 2 usage
"""
PROGRAM = "collective report"
PAGE, COMPARISON = "report.html", "comparison.html"


def parser(prog: str = PROGRAM) -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog=prog,
        description="Writes an HTML page of where the time of training steps went.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("profile", metavar="DIR", help="a profile")
    out.add_argument("other", metavar="DIR2", nargs="?", help="a profile to be shown next to it")
    out.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=f"the page; by default {PAGE} in DIR, or {COMPARISON} in DIR2",
    )
    return out


def main(arguments: list[str] | None = None, prog: str = PROGRAM) -> int:
    args = parser(prog).parse_args(arguments)
    paths = [args.profile, *filter(None, [args.other])]
    try:
        profiles = [load(path, name) for path, name in zip(paths, short_names(paths))]
        target = args.output or os.path.join(
            _folder(paths[-1]), PAGE if len(paths) == 1 else COMPARISON
        )
        write(target, page(profiles))
    except (OSError, ValueError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    print(target)
    return 0


def short_names(paths: list[str]) -> list[str]:
    """Returns the last part of each path; the paths themselves if these are the same."""
    names = [os.path.basename(os.path.abspath(_folder(path))) for path in paths]
    return names if len(set(names)) == len(names) else paths


def _folder(path: str) -> str:
    return path if os.path.isdir(path) else os.path.dirname(path)


if __name__ == "__main__":
    sys.exit(main())
