"""The command that prepares data: `collective data criteo FILE… [--output FOLDER]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from collective.job import scheduled_ranks


def main(arguments: Sequence[str] | None = None, prog: str = "collective data") -> int:
    """Runs the command and returns its exit code."""
    options = _parser(prog).parse_args(arguments)
    try:
        for path in _criteo(options.files, options.output):
            print(path)
    except (ImportError, OSError, ValueError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _criteo(files: list[str], folder: str | None) -> list[str]:
    """Converts files; a job's ranks share them. Only these need TensorFlow and Horovod."""
    if scheduled_ranks.is_in_job():
        from collective.data.criteo_logs import criteo

        return criteo(files, folder)
    from collective.data import criteo_files

    sources, targets = criteo_files.plan(files, folder)
    criteo_files.convert_new(sources, targets)
    return targets


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Prepares data for training.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    convert = commands.add_parser(
        "criteo",
        help="convert Criteo's click logs to Parquet",
        description="Converts Criteo's click logs (tab-separated: a label, 13 numbers, 26 keys of "
        "8 hexadecimal digits) to Parquet files, and prints their paths. Numbers become int32, "
        "keys int64, and empty fields 0. An existing file that isn't older than its source is "
        "kept.",
    )
    convert.add_argument("files", nargs="+", metavar="FILE", help="a file or a pattern; also .gz")
    convert.add_argument(
        "--output", metavar="FOLDER", help="where new files go; next to their sources if not given"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
