"""Decides after which steps a Trainer validates, saves, reports and stops: a pure function.

    records   0    B    2B   3B   4B   5B   6B
    steps     |  1 |  2 |  3 |  4 |  5 |  6 |          a step takes a global batch of B records
    Epoch(1)  |      R|       2R|       3R|            the first step after which R records are used
    boundary       .    2    .    4    .    6          at 2, 4 and 6

Every unit but Seconds is a number of records: a batch has B, an epoch R. A period of p records is
over after each step in which the number of used records passes a multiple of p. So a period that B
doesn't divide doesn't drift, and N, the number of ranks, is in no formula.

Source: `determined.pytorch.Trainer.fit`, whose units `Batch` and `Epoch` these are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator

from collective.policy import is_real, is_whole


@dataclasses.dataclass(frozen=True)
class Unit:
    """Says how often something happens, or when.

    Attributes:
        value: a number is a period; a collection of numbers are positions, counted from the first
            record of training.

    Raises:
        ValueError: a number isn't a whole one from 1 (for Seconds: above 0), or there is none.
    """

    value: int | float | Collection[int] | Collection[float]

    def __post_init__(self) -> None:
        name, least = type(self).__name__, "a number of seconds above 0"
        if not isinstance(self, Seconds):
            least = "a whole number from 1"
        if not self.numbers:
            raise ValueError(f"{name}({self.value!r}) has no position: give {least}, or leave it.")
        for number in self.numbers:
            if not _is_valid(number, isinstance(self, Seconds)):
                raise ValueError(f"{name}({self.value!r}): {number!r} isn't {least}.")

    @property
    def is_period(self) -> bool:
        """Tells whether it repeats; else it is a list of positions."""
        return not isinstance(self.value, Collection)

    @property
    def numbers(self) -> tuple[float, ...]:
        """Returns the period alone, or the positions."""
        return tuple(self.value) if isinstance(self.value, Collection) else (self.value,)


class Batch(Unit):
    """Counts global batches: steps, of all ranks together. `collective.data.Batch` is data."""


class Record(Unit):
    """Counts records, of all ranks together."""


class Epoch(Unit):
    """Counts passes over the training data."""


class Seconds(Unit):
    """Counts seconds of training, validation included, by rank 0's clock, over restarts."""


def _is_valid(number: object, may_be_fraction: bool) -> bool:
    if may_be_fraction:
        return is_real(number) and 0 < number < math.inf  # type: ignore[operator]
    return is_whole(number) and number >= 1  # type: ignore[operator]


@dataclasses.dataclass(frozen=True)
class Boundary:
    """Says what happens after a step, in this order: validate, save, report, stop.

    Attributes:
        step: the number of global batches used.
        validates, saves, reports, ends: whether it does.
    """

    step: int
    validates: bool = False
    saves: bool = False
    reports: bool = False
    ends: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.validates or self.saves or self.reports or self.ends)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Holds the length of training and its periods.

    Attributes:
        max_length: when training ends: one number of a unit.
        batch: B, the records of a global batch.
        records: R, the records of an epoch; only Epochs need it.
        validation, checkpoint, reporting: when to validate, save and report; None: at the end only.

    Raises:
        TypeError: something isn't a unit.
        ValueError: max_length has several positions, or an Epoch is used without R.
    """

    max_length: Unit
    batch: int
    records: int | None = None
    validation: Unit | None = None
    checkpoint: Unit | None = None
    reporting: Unit | None = None

    def __post_init__(self) -> None:
        for name, unit in self._units().items():
            if unit is None and name != "max_length":
                continue
            if not isinstance(unit, Unit) or type(unit) is Unit:
                example = 1000 if unit is None else unit
                raise TypeError(
                    f"{name}={unit!r} has no unit: write collective.trainer.Batch({example!r}), or "
                    "Record, Epoch, Seconds."
                )
            if isinstance(unit, Epoch) and not self.records:
                raise ValueError(
                    f"{name}={unit}: it isn't known how many records an epoch has. Give the "
                    "Trainer records_per_epoch."
                )
        if not self.max_length.is_period:
            raise ValueError(f"max_length={self.max_length}: it is one number, not positions.")

    def _units(self) -> dict[str, Unit | None]:
        return {
            "max_length": self.max_length,
            "validation_period": self.validation,
            "checkpoint_period": self.checkpoint,
            "reporting_period": self.reporting,
        }

    @property
    def uses_epochs(self) -> bool:
        """Tells whether R matters."""
        return any(isinstance(unit, Epoch) for unit in self._units().values())

    @property
    def last_step(self) -> int | None:
        """Returns the step after which training ends; None if the clock decides it."""
        if isinstance(self.max_length, Seconds):
            return None
        return -(-self._amount(self.max_length)[0] // self.batch)

    def boundary(self, step: int, before: float = 0.0, now: float = 0.0) -> Boundary:
        """Returns what happens after a step.

        Args:
            step: its number, from 1.
            before, now: seconds of training after the step before it, and after it.
        """
        ends = step >= self.last_step if self.last_step is not None else now >= self._length
        validates, saves, reports = (
            ends or self._passes(unit, step, before, now)
            for unit in (self.validation, self.checkpoint, self.reporting)
        )
        return Boundary(step, validates, saves, reports, ends)

    def share_of_time(self, seconds: float) -> tuple[float, float]:
        """Returns (the share that is done, the seconds left) of a training that the clock ends."""
        return min(1.0, seconds / self._length), max(0.0, self._length - seconds)

    @property
    def _length(self) -> float:
        return self.max_length.numbers[0]

    def boundaries(self) -> Iterator[Boundary]:
        """Yields all boundaries at which something happens, if no unit is Seconds."""
        for step in range(1, (self.last_step or 0) + 1):
            boundary = self.boundary(step)
            if not boundary.is_empty:
                yield boundary

    def epochs(self, step: int) -> float | None:
        """Returns how many epochs were used after a step; None if R isn't known."""
        return step * self.batch / self.records if self.records else None

    def _passes(self, unit: Unit | None, step: int, before: float, now: float) -> bool:
        """Tells whether a step brings the used amount to a position of a unit, or past it."""
        if unit is None:
            return False
        if not isinstance(unit, Seconds):
            before, now = (step - 1) * self.batch, step * self.batch
        amounts = self._amount(unit)
        if unit.is_period:
            return now // amounts[0] > before // amounts[0]
        return any(before < amount <= now for amount in amounts)

    def _amount(self, unit: Unit) -> tuple[int, ...]:
        """Returns the numbers of a unit as records; those of Seconds unchanged."""
        each = {Batch: self.batch, Record: 1, Epoch: self.records, Seconds: 1}[type(unit)]
        return tuple(number * (each or 0) for number in unit.numbers)  # type: ignore[misc]
