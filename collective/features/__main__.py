"""The command that prints schemas: `python -m collective.features schema slots`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from collective.features.global_config import GlobalConfig
from collective.features.slots import Slots
from collective.yaml_file import StrictModel

_MODELS: dict[str, type[StrictModel]] = {"slots": Slots, "global": GlobalConfig}


def main(arguments: Sequence[str] | None = None, prog: str = "collective.features") -> int:
    """Runs the command and returns its exit code."""
    options = _parser(prog).parse_args(arguments)
    print(json.dumps(_MODELS[options.file].model_json_schema(), indent=2))
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Describes PERSIA's files.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    schema = commands.add_parser(
        "schema",
        help="print the JSON schema of a file, by which an editor completes and checks its keys",
    )
    schema.add_argument("file", choices=_MODELS, help="embedding_config.yml or global_config.yml")
    return parser


if __name__ == "__main__":
    sys.exit(main())
