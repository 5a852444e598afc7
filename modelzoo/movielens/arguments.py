"""The command line of train.py. What is wrong with it is said once, by rank 0, and ends every rank
with exit code 2.
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
DATA_SET = "movielens"
# tensorflow-datasets calls it one or the other, and so the folder
HANDLES = ("movie_lens", "movielens")
CONFIG = "100k-ratings"

# The optimizers and their default learning rates.
LEARNING_RATES = {"adagrad": 1.0, "adam": 0.005, "ftrl": 1.0, "momentum": 1.0, "sgd": 10.0}


@dataclass(frozen=True)
class Options:
    batch_size: int  # of all ranks together
    epochs: int
    steps: int | None  # instead of epochs
    seed: int
    optimizer: str
    learning_rate: float
    dim: int
    l2: float
    # a data directory of tensorflow-datasets that holds the ratings; None: they are downloaded
    folder: Path | None
    generated: bool
    ratings: int  # how many to generate
    model_dir: str | None
    export_dir: str | None

    def total_steps(self, ratings: int) -> int:
        return self.steps or self.epochs * self.steps_of_an_epoch(ratings)

    def steps_of_an_epoch(self, ratings: int) -> int:
        return ratings // self.batch_size


class Parser(argparse.ArgumentParser):
    """Speaks on rank 0 only."""

    def __init__(self, rank: int):
        super().__init__(
            prog="train.py",
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            description="Trains a model of movie ratings with dynamic embedding tables, evaluates "
            "it on ratings that were held "
            "out, and exports it.",
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
    add("--batch-size", type=_whole(1), default=240, help="ratings of a step, all ranks together")
    add("--epochs", type=_whole(1), default=6, help="how often to go through the training ratings")
    add("--steps", type=_whole(1), help="end after so many steps, whatever --epochs says")
    add(
        "--seed",
        type=_whole(0, 2**31 - 1),
        default=0,
        help="of the initial values and of the order of the ratings",
    )
    add(
        "--optimizer",
        choices=sorted(LEARNING_RATES),
        default="adam",
        help="for the tables and the bias",
    )
    add(
        "--learning-rate",
        type=_positive,
        help=f"the default depends on the optimizer: {LEARNING_RATES}",
    )
    add("--dim", type=_whole(1), default=8, help="the dimension of the tastes of users and movies")
    add(
        "--l2",
        type=_not_negative,
        default=0.02,
        help="how much the squares of a rating's two rows add to its loss",
    )
    add(
        "--data-dir",
        help=f"a data directory of tensorflow-datasets that holds "
        f"{HANDLES[0]}/{CONFIG}; the default is "
        f"${DATA_DIR_VARIABLE}/{DATA_SET} if that holds it; without one the "
        f"ratings are downloaded",
    )
    add("--generated", action="store_true", help="train on generated ratings")
    add(
        "--ratings",
        type=_whole(10),
        default=100_000,
        help="how many ratings to generate, where they are generated",
    )
    add(
        "--model-dir",
        help="for checkpoints and summaries, a folder that all ranks reach; "
        "training goes on from the latest "
        "checkpoint there; the default is a temporary one",
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
    if given.data_dir and not given.generated:
        folder = Path(given.data_dir)
        if not holds_ratings(folder):
            command.error(
                f"no {HANDLES[0]}/{CONFIG} in {folder}: --data-dir is a folder that "
                f"tensorflow-datasets has prepared "
                "them in; without it they are downloaded"
            )
    elif os.environ.get(DATA_DIR_VARIABLE) and not given.generated:
        usual = Path(os.environ[DATA_DIR_VARIABLE]) / DATA_SET
        folder = usual if holds_ratings(usual) else None
    return Options(
        batch_size=given.batch_size,
        epochs=given.epochs,
        steps=given.steps,
        seed=given.seed,
        optimizer=given.optimizer,
        learning_rate=rate,
        dim=given.dim,
        l2=given.l2,
        folder=folder,
        generated=given.generated,
        ratings=given.ratings,
        model_dir=given.model_dir,
        export_dir=given.export_dir,
    )


def holds_ratings(folder: Path) -> bool:
    """Whether `folder` is a data directory in which some version of the ratings is prepared."""
    return any(any((folder / handle / CONFIG).glob("*/dataset_info.json")) for handle in HANDLES)


def check_batch_size(batch: int, rank: int, ranks: int) -> None:
    if batch % ranks:
        nearest = max(ranks, round(batch / ranks) * ranks)
        parser(rank).error(
            f"--batch-size {batch} is the batch of all ranks together, and {ranks} "
            f"ranks do not divide "
            f"it; the nearest that they do is {nearest}"
        )


def check_ratings(batch: int, ratings: int, rank: int) -> None:
    if batch > ratings:
        parser(rank).error(f"--batch-size {batch} is more than the {ratings} training ratings")


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


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _positive(text: str) -> float:
    value = _number(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} instead of a number above 0")
    return value


def _not_negative(text: str) -> float:
    value = _number(text)
    if not (value >= 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} instead of a number of at least 0")
    return value
