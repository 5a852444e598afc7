"""Shows, consolidates, verifies and imports checkpoints: `collective checkpoint`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

# Without a GPU, TensorFlow's import always says that it can't register CUDA's libraries.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def main(arguments: list[str] | None = None, prog: str = "collective checkpoint") -> int:
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
        "target", metavar="OUT", help="the new checkpoint's prefix, at which nothing may be"
    )
    verifying = commands.add_parser(
        "verify", help="read all of a checkpoint and its increments, and say whether it is whole"
    )
    verifying.add_argument(
        "path",
        help="a checkpoint's prefix, an increment's (the state up to it), or a folder: all "
        "checkpoints in it",
    )
    _add_import(commands, path_help)
    args = parser.parse_args(arguments)

    import tensorflow.compat.v1 as tf

    from collective.checkpoint.reading import consolidate

    try:
        if args.command == "show":
            print(consolidate.description(args.path))
        elif args.command == "verify":
            print(consolidate.verify(args.path))
        elif args.command == "import":
            print(_import(args))
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


def _add_import(commands: Any, path_help: str) -> None:
    importing = commands.add_parser(
        "import",
        help="make a checkpoint of this library of one of DeepRec, HybridBackend or "
        "SparseOperationKit: tables, slots and ordinary variables",
    )
    importing.add_argument("framework", choices=["deeprec", "hybridbackend", "sok"])
    importing.add_argument("path", metavar="IN", help=f"{path_help}; of sok the folder of the dump")
    importing.add_argument("target", metavar="OUT", help="the new checkpoint's prefix")
    importing.add_argument(
        "--map",
        metavar="FILE",
        help="new names: lines 'old = new', one * in each stands for any text, an empty new name "
        "leaves the variable out; or a mapping in a file .yaml or .json. Slots follow their table",
    )
    importing.add_argument(
        "--without-slots", action="store_true", help="leave out optimizers' slots"
    )
    importing.add_argument(
        "--in-order",
        action="append",
        default=[],
        metavar="NAME",
        help="hybridbackend: this variable isn't sharded, though it is saved in slices",
    )
    for kind in ("static", "dynamic"):
        importing.add_argument(
            f"--{kind}",
            action="append",
            default=[],
            metavar="TABLE",
            help=f"sok: this table, whose keys are 0 … V - 1, is {kind}",
        )
    importing.add_argument(
        "--dense", metavar="PATH", help="sok: a TensorFlow checkpoint with the other variables"
    )


def _import(args: argparse.Namespace) -> Any:
    from collective.checkpoint.importing import reader_choice
    from collective.checkpoint.reading.name_map import NameMap

    kinds = {name: kind for kind in ("static", "dynamic") for name in getattr(args, kind)}
    return reader_choice.import_checkpoint(
        args.framework,
        args.path,
        args.target,
        None if args.map is None else NameMap.from_file(args.map),
        not args.without_slots,
        in_order=args.in_order,
        kinds=kinds,
        dense=args.dense,
    )


def _folder(path: str) -> str:
    """Returns the folder of a checkpoint, given its prefix or its folder."""
    return os.path.realpath(path if os.path.isdir(path) else os.path.dirname(path) or ".")


if __name__ == "__main__":
    sys.exit(main())
