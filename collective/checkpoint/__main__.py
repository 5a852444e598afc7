"""Looks into checkpoints, and makes plain ones of them: `python -m collective.checkpoint`."""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m collective.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print the tables and variables of a checkpoint")
    show.add_argument("path", help="a checkpoint's prefix, or a folder: its latest checkpoint")
    whole = commands.add_parser(
        "consolidate",
        help="make the checkpoint that one rank would have "
        "saved: static tables whole, "
        "as plain TensorFlow's, dynamic ones in one part with ascending "
        "keys",
    )
    whole.add_argument(
        "path", metavar="IN", help="a checkpoint's prefix, or a folder: its latest checkpoint"
    )
    whole.add_argument(
        "target", metavar="OUT", help="the new checkpoint's prefix; its folder must be there"
    )
    given = parser.parse_args(arguments)

    import tensorflow.compat.v1 as tf

    from collective.checkpoint import consolidate

    try:
        if given.command == "show":
            print(consolidate.description(given.path))
        else:
            consolidate.consolidate(given.path, given.target)
            print(consolidate.description(given.target))
    except (ValueError, OSError, tf.errors.OpError) as error:
        print(
            f"{parser.prog} {given.command}: {getattr(error, 'message', None) or error}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
