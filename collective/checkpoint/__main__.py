"""Shows, consolidates and verifies checkpoints: `python -m collective.checkpoint`."""

from __future__ import annotations

import argparse
import os
import sys

# Without a GPU TensorFlow's import says on every machine that it can't register CUDA's libraries.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def main(arguments: list[str] | None = None, prog: str = "python -m collective.checkpoint") -> int:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    path_help = (
        "a checkpoint's prefix, an increment's (the state up to it), or a folder: its newest state"
    )
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
    verifying = commands.add_parser(
        "verify", help="read all of a checkpoint and its increments, and say whether it is whole"
    )
    verifying.add_argument("path", help=path_help)
    args = parser.parse_args(arguments)

    import tensorflow.compat.v1 as tf

    from collective.checkpoint import consolidate

    try:
        if args.command == "show":
            print(consolidate.description(args.path))
        elif args.command == "verify":
            print(consolidate.verify(args.path))
        else:
            consolidate.consolidate(args.path, args.target)
            print(consolidate.description(args.target))
            if _folder(args.target) == _folder(args.path):
                print(
                    f"{parser.prog} consolidate: hint: '{args.target}' lies among the job's own "
                    "checkpoints; the job neither restores nor deletes it. Another folder keeps "
                    "them apart.",
                    file=sys.stderr,
                )
    except (ValueError, OSError, tf.errors.OpError) as error:
        message = getattr(error, "message", None) or error
        print(f"{parser.prog} {args.command}: {message}", file=sys.stderr)
        return 1
    return 0


def _folder(path: str) -> str:
    """Returns the folder of a checkpoint, which is named by its prefix or by its folder."""
    return os.path.realpath(path if os.path.isdir(path) else os.path.dirname(path) or ".")


if __name__ == "__main__":
    sys.exit(main())
