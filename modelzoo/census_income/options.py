"""Defines the command line of both programs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from common.command_line import TrainingOptions, TrainingParser, whole_number

DATA_DIR_VARIABLE = "COLLECTIVE_DATA_DIR"
DATA_SET, FILES = "census-income", ("adult.data", "adult.test")

# The optimizers and their default learning rates.
LEARNING_RATES = {
    "adadelta": 1.0,
    "adagrad": 0.05,
    "adam": 0.001,
    "ftrl": 0.3,
    "momentum": 0.03,
    "rmsprop": 0.001,
    "sgd": 0.3,
}


@dataclass(frozen=True)
class Options(TrainingOptions):
    census_dir: Path | None  # holds the census files; None: they are downloaded
    click_log: bool
    checkpoint_dir: str | None
    save_steps: int


def parser(rank: int) -> TrainingParser:
    result = TrainingParser(
        rank,
        "Trains a model of census income with sharded embedding tables and prints its test AUC.",
        examples="rows",
        learning_rates=LEARNING_RATES,
        batch_size=384,
        epochs=8,
        optimizer="adagrad",
    )
    add = result.add_argument
    add(
        "--data-dir",
        default=os.environ.get(DATA_DIR_VARIABLE) or None,
        help=f"the folder of data sets that holds {DATA_SET}/ ({', '.join(FILES)}); also "
        f"${DATA_DIR_VARIABLE}; without it the files are downloaded",
    )
    add(
        "--click-log",
        action="store_true",
        help="train on the generated click log instead of the census data",
    )
    add(
        "--checkpoint-dir",
        help="save checkpoints in this folder, which all ranks reach, and go on from the latest "
        "one there",
    )
    add(
        "--save-steps",
        type=whole_number(1),
        default=200,
        help="save a checkpoint after every so many steps",
    )
    return result


def parse(arguments: list[str] | None = None, rank: int = 0) -> Options:
    command_line = parser(rank)
    training, parsed = command_line.parse_training_args(arguments)
    census_dir = None
    if parsed.data_dir and not parsed.click_log:
        census_dir = Path(parsed.data_dir) / DATA_SET
        missing = [name for name in FILES if not (census_dir / name).is_file()]
        if missing:
            command_line.error(
                f"no {' and no '.join(missing)} in {census_dir}: --data-dir or "
                f"{DATA_DIR_VARIABLE} names the folder that holds {DATA_SET}/; without both the "
                f"files are downloaded"
            )
    return Options(
        **training,
        census_dir=census_dir,
        click_log=parsed.click_log,
        checkpoint_dir=parsed.checkpoint_dir,
        save_steps=parsed.save_steps,
    )


def check_export(options: Options, rank: int) -> None:
    if options.export_dir and not options.checkpoint_dir:
        parser(rank).error(
            f"--export-dir {options.export_dir} exports the last checkpoint, and without "
            f"--checkpoint-dir there is none"
        )
