"""The command line of both programs. What is wrong with it is said once, by rank 0, and ends every
rank with exit code 2.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

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
class Options:
    batch_size: int  # of all ranks together
    epochs: int
    steps: int | None  # instead of epochs
    seed: int
    optimizer: str
    learning_rate: float
    dim: int
    folder: Path | None  # of the census files; None: they are downloaded
    click_log: bool
    checkpoint_dir: str | None
    save_steps: int
    export_dir: str | None

    def total_steps(self, rows: int) -> int:
        return self.steps or self.epochs * (rows // self.batch_size)


class Parser(argparse.ArgumentParser):
    """Speaks on rank 0 only."""

    def __init__(self, rank: int):
        super().__init__(
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            description="Trains a model of census income with sharded embedding tables and prints "
            "its test AUC.",
        )
        self._rank = rank

    def _print_message(self, message, file=None):
        if self._rank == 0:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help explains the options)\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            self._print_message(message, sys.stderr)
        if status and self._rank != 0:
            # Rank 0 goes first: as soon as it has, the launcher shows its words as the cause and
            # ends this rank.
            time.sleep(5)
        sys.exit(status)


def parser(rank: int) -> Parser:
    result = Parser(rank)
    add = result.add_argument
    add("--batch-size", type=_whole(1), default=384, help="rows of a step, all ranks together")
    add("--epochs", type=_whole(1), default=8, help="how often to go through the training rows")
    add("--steps", type=_whole(1), help="end after so many steps, whatever --epochs says")
    add(
        "--seed",
        type=_whole(0, 2**31 - 1),
        default=0,
        help="of the initial values and of the order of the rows",
    )
    add(
        "--optimizer",
        choices=sorted(LEARNING_RATES),
        default="adagrad",
        help="for the tables and the network",
    )
    add(
        "--learning-rate",
        type=_positive,
        help=f"the default depends on the optimizer: {LEARNING_RATES}",
    )
    add("--dim", type=_whole(1), default=8, help="the dimension of the tables")
    add(
        "--data-dir",
        default=os.environ.get(DATA_DIR_VARIABLE) or None,
        help=f"the folder of data sets that holds {DATA_SET}/ ({', '.join(FILES)}); also "
        f"${DATA_DIR_VARIABLE}; "
        "without it the files are downloaded",
    )
    add(
        "--click-log",
        action="store_true",
        help="train on the generated click log instead of the census data",
    )
    add(
        "--checkpoint-dir",
        help="save checkpoints in this folder, which all ranks reach, and go "
        "on from the latest one there",
    )
    add(
        "--save-steps",
        type=_whole(1),
        default=200,
        help="save a checkpoint after every so many steps",
    )
    add("--export-dir", help="export the trained model to a new folder in this one")
    return result


def parse(arguments: list[str] | None = None, rank: int = 0) -> Options:
    command = parser(rank)
    given = command.parse_args(arguments)
    rate = (
        given.learning_rate if given.learning_rate is not None else LEARNING_RATES[given.optimizer]
    )
    folder = None
    if given.data_dir and not given.click_log:
        folder = Path(given.data_dir) / DATA_SET
        missing = [name for name in FILES if not (folder / name).is_file()]
        if missing:
            command.error(
                f"no {' and no '.join(missing)} in {folder}: --data-dir or "
                f"{DATA_DIR_VARIABLE} names the "
                f"folder that holds {DATA_SET}/; without both the files are downloaded"
            )
    return Options(
        batch_size=given.batch_size,
        epochs=given.epochs,
        steps=given.steps,
        seed=given.seed,
        optimizer=given.optimizer,
        learning_rate=rate,
        dim=given.dim,
        folder=folder,
        click_log=given.click_log,
        checkpoint_dir=given.checkpoint_dir,
        save_steps=given.save_steps,
        export_dir=given.export_dir,
    )


def check_export(chosen: Options, rank: int) -> None:
    if chosen.export_dir and not chosen.checkpoint_dir:
        parser(rank).error(
            f"--export-dir {chosen.export_dir} exports the last checkpoint, and "
            f"without --checkpoint-dir there "
            "is none"
        )


def check_batch_size(batch: int, rank: int, ranks: int) -> None:
    if batch % ranks:
        nearest = max(ranks, round(batch / ranks) * ranks)
        parser(rank).error(
            f"--batch-size {batch} is the batch of all ranks together, and {ranks} "
            f"ranks do not divide "
            f"it; the nearest that they do is {nearest}"
        )


def check_rows(batch: int, rows: int, rank: int) -> None:
    if batch > rows:
        parser(rank).error(
            f"--batch-size {batch} is more than the {rows} training rows: not one "
            f"batch would be full"
        )


def _whole(low: int, high: int | None = None) -> Callable[[str], int]:
    span = f"from {low} to {high}" if high is not None else f"of at least {low}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{text!r} instead of a whole number {span}")
        return value

    return convert


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} instead of a number above 0")
    return value
