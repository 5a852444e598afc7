"""Defines the command line of train.py."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from common.command_line import (
    TrainingOptions,
    TrainingParser,
    non_negative_number,
    whole_number,
)

DATA_DIR_VARIABLE = "COLLECTIVE_DATA_DIR"
DATA_SET = "movielens"
# tensorflow-datasets calls the data set one or the other, and so its folder.
HANDLES = ("movie_lens", "movielens")
CONFIG = "100k-ratings"

# The optimizers and their default learning rates.
LEARNING_RATES = {"adagrad": 1.0, "adam": 0.005, "ftrl": 1.0, "momentum": 1.0, "sgd": 10.0}


@dataclass(frozen=True)
class Options(TrainingOptions):
    l2: float
    # a data directory of tensorflow-datasets that holds the ratings; None: they are downloaded
    data_dir: Path | None
    generated: bool
    ratings: int  # how many to generate
    model_dir: str | None


def parser(rank: int) -> TrainingParser:
    result = TrainingParser(
        rank,
        "Trains a model of movie ratings with dynamic embedding tables, evaluates it on ratings "
        "that were held out, and exports it.",
        examples="ratings",
        learning_rates=LEARNING_RATES,
        batch_size=240,
        epochs=6,
        optimizer="adam",
    )
    add = result.add_argument
    add(
        "--l2",
        type=non_negative_number,
        default=0.02,
        help="how much the squares of a rating's two rows add to its loss",
    )
    add(
        "--data-dir",
        help=f"a data directory of tensorflow-datasets that holds {HANDLES[0]}/{CONFIG}; the "
        f"default is ${DATA_DIR_VARIABLE}/{DATA_SET} if that holds it; without one the ratings "
        f"are downloaded",
    )
    add("--generated", action="store_true", help="train on generated ratings")
    add(
        "--ratings",
        type=whole_number(10),
        default=100_000,
        help="how many ratings to generate, where they are generated",
    )
    add(
        "--model-dir",
        help="for checkpoints and summaries, a folder that all ranks reach; training goes on from "
        "the latest checkpoint there; the default is a temporary one",
    )
    return result


def parse(arguments: list[str] | None = None, rank: int = 0) -> Options:
    command_line = parser(rank)
    training, parsed = command_line.parse_training_args(arguments)
    data_dir = None
    if parsed.data_dir and not parsed.generated:
        data_dir = Path(parsed.data_dir)
        if not holds_ratings(data_dir):
            command_line.error(
                f"no {HANDLES[0]}/{CONFIG} in {data_dir}: --data-dir is a folder that "
                f"tensorflow-datasets has prepared them in; without it they are downloaded"
            )
    elif os.environ.get(DATA_DIR_VARIABLE) and not parsed.generated:
        default = Path(os.environ[DATA_DIR_VARIABLE]) / DATA_SET
        data_dir = default if holds_ratings(default) else None
    return Options(
        **training,
        l2=parsed.l2,
        data_dir=data_dir,
        generated=parsed.generated,
        ratings=parsed.ratings,
        model_dir=parsed.model_dir,
    )


def holds_ratings(data_dir: Path) -> bool:
    """Tells whether some version of the ratings is prepared in a data directory."""
    return any(any((data_dir / handle / CONFIG).glob("*/dataset_info.json")) for handle in HANDLES)
