"""Defines the command line of a training program, the same on every rank.

Rank 0 says what is wrong with it, once, and every rank ends with exit code 2.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NoReturn

LARGEST_SEED = 2**31 - 1


@dataclass(frozen=True)
class TrainingOptions:
    """Holds the options that every training program has."""

    batch_size: int  # of all ranks together
    epochs: int
    steps: int | None  # instead of epochs
    seed: int
    optimizer: str
    learning_rate: float
    dim: int
    export_dir: str | None

    def steps_per_epoch(self, examples: int) -> int:
        return examples // self.batch_size

    def total_steps(self, examples: int) -> int:
        return self.steps or self.epochs * self.steps_per_epoch(examples)


class TrainingParser(argparse.ArgumentParser):
    """Parses the options that every training program has, and speaks on rank 0 only.

    Args:
        rank: this process's rank.
        description: the first lines of `--help`.
        examples: what the program calls the examples it trains on: 'rows', say.
        learning_rates: the optimizers to choose from and their default learning rates.
        batch_size, epochs, optimizer: the default values of these options.
    """

    def __init__(
        self,
        rank: int,
        description: str,
        *,
        examples: str,
        learning_rates: dict[str, float],
        batch_size: int,
        epochs: int,
        optimizer: str,
    ):
        super().__init__(
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            description=description,
        )
        self._rank = rank
        self._examples = examples
        self._learning_rates = learning_rates
        add = self.add_argument
        add(
            "--batch-size",
            type=whole_number(1),
            default=batch_size,
            help=f"{examples} of a step, all ranks together",
        )
        add(
            "--epochs",
            type=whole_number(1),
            default=epochs,
            help=f"how often to go through the training {examples}",
        )
        add("--steps", type=whole_number(1), help="end after so many steps, whatever --epochs says")
        add(
            "--seed",
            type=whole_number(0, LARGEST_SEED),
            default=0,
            help=f"of the initial values and of the order of the {examples}",
        )
        add(
            "--optimizer",
            choices=sorted(learning_rates),
            default=optimizer,
            help="for the tables and all other variables",
        )
        add(
            "--learning-rate",
            type=positive_number,
            help=f"the default depends on the optimizer: {learning_rates}",
        )
        add("--dim", type=whole_number(1), default=8, help="the dimension of the embeddings")
        add("--export-dir", help="export the trained model to a new folder in this one")

    def parse_training_args(
        self, arguments: list[str] | None
    ) -> tuple[dict[str, Any], argparse.Namespace]:
        """Parses a command line; returns the fields of `TrainingOptions`, and everything."""
        parsed = self.parse_args(arguments)
        if parsed.learning_rate is None:
            parsed.learning_rate = self._learning_rates[parsed.optimizer]
        training = {field.name: getattr(parsed, field.name) for field in fields(TrainingOptions)}
        return training, parsed

    def check_batch_size(self, batch_size: int, ranks: int) -> None:
        if batch_size % ranks == 0:
            return
        nearest = max(ranks, round(batch_size / ranks) * ranks)
        self.error(
            f"--batch-size {batch_size} is the batch of all ranks together, and {ranks} ranks do "
            f"not divide it; the nearest that they do is {nearest}"
        )

    def check_full_batch(self, batch_size: int, examples: int) -> None:
        if batch_size > examples:
            self.error(
                f"--batch-size {batch_size} is more than the {examples} training "
                f"{self._examples}: not one batch would be full"
            )

    def remark(self, message: str) -> None:
        """Prints a line on stderr, on rank 0 only."""
        self._print_message(f"{self.prog}: {message}\n", sys.stderr)

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


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """Makes an argument's type: whole numbers from `low` to `high`."""
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


def positive_number(text: str) -> float:
    value = _finite_number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} instead of a number above 0")
    return value


def non_negative_number(text: str) -> float:
    value = _finite_number(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} instead of a number of at least 0")
    return value


def _finite_number(text: str) -> float:
    """Returns NaN, which no comparison accepts, for everything but a finite number."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan
