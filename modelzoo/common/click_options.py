"""Defines the command line of a program that trains on clicks."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from common.command_line import TrainingOptions, TrainingParser, whole_number

MODES = ("train", "evaluate", "export", "predict")


@dataclass(frozen=True)
class Defaults:
    """Holds what differs from program to program.

    Attributes:
        description: the first lines of `--help`.
        learning_rates: the optimizers to choose from and their default learning rates.
        optimizer, batch_size, epochs, rows, dim: the default values of these options.
        add: adds the program's own options.
        check: refuses options of the program that don't go together.
    """

    description: str
    learning_rates: dict[str, float]
    optimizer: str
    batch_size: int = 512
    epochs: int = 2
    rows: int = 200_000
    dim: int = 4
    add: Callable[[TrainingParser], None] = lambda parser: None
    check: Callable[[TrainingParser, argparse.Namespace], None] = lambda parser, parsed: None


@dataclass(frozen=True)
class ClickOptions(TrainingOptions):
    """Holds the options of every program that trains on clicks.

    Attributes:
        own: everything that was parsed, with the options of one program only.
    """

    mode: str
    data: str | None
    rows: int  # how many to generate
    buckets: int
    checkpoint_dir: str | None
    save_steps: int | None
    keep_checkpoints: int
    predictions: str | None
    losses: str | None
    own: argparse.Namespace


def parser(defaults: Defaults, rank: int) -> TrainingParser:
    result = TrainingParser(
        rank,
        defaults.description,
        examples="rows",
        learning_rates=defaults.learning_rates,
        batch_size=defaults.batch_size,
        epochs=defaults.epochs,
        optimizer=defaults.optimizer,
    )
    add = result.add_argument
    add(
        "--mode",
        choices=MODES,
        default="train",
        help="train (and evaluate at the end); or work on the latest checkpoint: evaluate it, "
        "export it, or predict for the evaluation's rows",
    )
    add(
        "--data",
        help="a folder with train.txt and eval.txt, Criteo's tab-separated text, or with "
        "train.csv and eval.csv, the same with commas, or with train.parquet and eval.parquet; "
        "without it a log is generated",
    )
    add(
        "--rows",
        type=whole_number(100),
        default=defaults.rows,
        help="how many rows to generate, a tenth of them for evaluation",
    )
    add(
        "--buckets",
        type=whole_number(1),
        default=100_000,
        help="rows of each table where ids are hashes, as those of --data",
    )
    add(
        "--checkpoint-dir",
        help="save checkpoints in this folder, which all ranks reach, and go on from the latest "
        "one there",
    )
    add(
        "--save-steps",
        type=whole_number(1),
        help="save a checkpoint after every so many steps; the default is at the end",
    )
    add(
        "--keep-checkpoints",
        type=whole_number(1),
        default=5,
        help="how many of the latest checkpoints to keep",
    )
    add("--predictions", help="the folder for the files of --mode predict")
    add("--losses", help="a file for the course of the loss, which loss_curve.py draws")
    result.set_defaults(dim=defaults.dim)
    defaults.add(result)
    return result


def parse(defaults: Defaults, arguments: list[str] | None, rank: int) -> ClickOptions:
    command_line = parser(defaults, rank)
    training, parsed = command_line.parse_training_args(arguments)
    defaults.check(command_line, parsed)
    needs = {
        "evaluate": ("checkpoint_dir",),
        "export": ("checkpoint_dir", "export_dir"),
        "predict": ("checkpoint_dir", "predictions"),
        "train": (),
    }
    for name in needs[parsed.mode]:
        if not getattr(parsed, name):
            command_line.error(f"--mode {parsed.mode} needs --{name.replace('_', '-')}")
    if parsed.mode == "train":
        if parsed.export_dir and not parsed.checkpoint_dir:
            command_line.error(
                f"--export-dir {parsed.export_dir} exports the last checkpoint, and without "
                f"--checkpoint-dir there is none"
            )
        if parsed.predictions:
            command_line.error("--predictions is for --mode predict")
    elif parsed.losses:
        command_line.error("--losses is for --mode train")
    names = {field.name for field in dataclasses.fields(ClickOptions)} - {"own", *training}
    return ClickOptions(**training, **{name: getattr(parsed, name) for name in names}, own=parsed)
