"""Shows and consolidates checkpoints: `python -m collective.checkpoint`."""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def main(arguments: list[str] | None = None, prog: str = "python -m collective.checkpoint") -> int:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    path_help = "a checkpoint's prefix, or a folder: its latest checkpoint"
    show = commands.add_parser("show", help="print the tables and variables of a checkpoint")
    show.add_argument("path", help=path_help)
    consolidating = commands.add_parser(
        "consolidate",
        help="make the checkpoint that one rank would have saved: static tables whole, as plain "
        "TensorFlow's, dynamic ones in one part with ascending keys",
    )
    consolidating.add_argument("path", metavar="IN", help=path_help)
    consolidating.add_argument(
        "target", metavar="OUT", help="the new checkpoint's prefix; its folder must be there"
    )
    args = parser.parse_args(arguments)

    import tensorflow.compat.v1 as tf

    from collective.checkpoint import consolidate

    try:
        if args.command == "show":
            print(consolidate.description(args.path))
        else:
            consolidate.consolidate(args.path, args.target)
            print(consolidate.description(args.target))
    except (ValueError, OSError, tf.errors.OpError) as error:
        message = getattr(error, "message", None) or error
        print(f"{parser.prog} {args.command}: {message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
