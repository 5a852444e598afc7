"""Describes the work of a training step: tables, ids, batch, network.

Symbols: N ranks, B samples of all ranks together, V rows of dimension D.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, cast

Kind = Literal["rows", "replicated", "whole"]
KINDS: tuple[Kind, ...] = ("rows", "replicated", "whole")
Placement = str  # 'rows', 'replicated', or 'whole:K' for a table that rank K has whole

MOST = 2**63 - 1  # rows, samples or numbers: what an int64 can count
TYPE_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
# Of a key, its place and its counters in the index of a dynamic table (ops/native/row_store.h keeps
# more free places than keys).
INDEX_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Rule:
    """Describes what an optimizer keeps and touches.

    Attributes:
        slots: numbers per number of a row.
        numbers: numbers per row in addition.
        all_rows: whether a step changes every row, not only those that were looked up.
    """

    slots: int
    numbers: int = 0
    all_rows: bool = False


# By the names of files. TensorFlow's Adam decays the slots of all rows, and moves all rows.
OPTIMIZERS = {
    "sgd": Rule(0),
    "momentum": Rule(1),
    "adagrad": Rule(1),
    "rowwise_adagrad": Rule(0, numbers=1),
    "adam": Rule(2, all_rows=True),
    "lazy_adam": Rule(2),
    "rmsprop": Rule(2),
    "adadelta": Rule(2),
    "ftrl": Rule(2),
}


@dataclasses.dataclass(frozen=True)
class TableWork:
    """Describes a table and its lookups.

    Attributes:
        name: the table's.
        rows: V; of a dynamic table, how many it is expected to have.
        dimension: D.
        type: a key of `TYPE_BYTES`.
        ids: ids of a sample, on average.
        distinct: how much of a rank's ids in a step are distinct, above 0 and at most 1. None if it
            isn't known: then as many as if all rows were equally likely, which is the most that
            independent ids can have on average.
        distinct_at: how many ids a rank had in a step when `distinct` was measured; None if it
            holds for any number. Of n times as many ids, n^β times as many are distinct: Heaps'
            law, of which one measurement tells β.
        optimizer: a key of `OPTIMIZERS`.
        imbalance: keys that the busiest owner is asked for, divided by the mean, from 1.
        dynamic: whether the number of rows is open.
        bounded: whether its policy has a weight_bound.
        placement: 'rows', 'replicated', 'whole:K', or 'whole' for any rank; None if the planner is
            to choose.
    """

    name: str
    rows: int
    dimension: int
    type: str = "float32"
    ids: float = 1.0
    distinct: float | None = None
    optimizer: str = "adagrad"
    imbalance: float = 1.0
    dynamic: bool = False
    bounded: bool = False
    placement: Placement | None = None
    distinct_at: float | None = None

    @property
    def rule(self) -> Rule:
        return OPTIMIZERS[self.optimizer]

    @property
    def weight_bytes(self) -> int:
        """The bytes of a row without slots."""
        return self.dimension * TYPE_BYTES[self.type]

    @property
    def row_bytes(self) -> int:
        """The bytes of a row with slots, and with its part of a dynamic table's index."""
        numbers = self.dimension * (1 + self.rule.slots) + self.rule.numbers
        return numbers * TYPE_BYTES[self.type] + INDEX_BYTES * self.dynamic

    @property
    def elements(self) -> int:
        """The numbers of its gradient as a matrix, with one number per row."""
        return self.rows * (self.dimension + 1)

    def distinct_of(self, ids: float) -> float:
        """Returns how many of a rank's ids are expected to be distinct."""
        if self.distinct is None:
            return distinct_of_equally_likely(ids, self.rows)
        if self.distinct_at is None or self.distinct_at <= 1:
            return min(ids * self.distinct, self.rows)
        if ids <= 1:
            return ids
        exponent = max(0.0, 1 + math.log(self.distinct) / math.log(self.distinct_at))
        return min(ids**exponent, self.rows)

    @property
    def kinds(self) -> list[Kind]:
        """The placements that it can have."""
        return [kind for kind in KINDS if not self.refusal(kind)]

    def refusal(self, kind: Kind) -> str:
        """Says why it can't be placed so; '' if it can."""
        if self.placement is not None and kind != kind_of(self.placement):
            return f"placement: {self.placement} is given"
        if kind == "replicated" and self.dynamic:
            return "a dynamic table can't be replicated"
        if kind == "replicated" and self.bounded:
            return "a table with a weight_bound can't be replicated"
        return ""

    def owners(self, ranks: int) -> Sequence[int]:
        """Returns which of `ranks` ranks can have it whole."""
        given = owner_of(self.placement or "")
        return range(ranks) if given is None else [given % ranks]


def kind_of(placement: Placement) -> Kind:
    """Returns a placement without the rank."""
    return cast(Kind, placement.partition(":")[0])


def owner_of(placement: Placement) -> int | None:
    """Returns the rank that has a table whole; None if ranks share it, or none is named."""
    kind, _, rank = placement.partition(":")
    return int(rank) if kind == "whole" and rank else None


@dataclasses.dataclass(frozen=True)
class Workload:
    """Describes a training step.

    Attributes:
        tables: in any order.
        batch: B.
        parameters: numbers of the dense network, which every rank has.
    """

    tables: Sequence[TableWork]
    batch: int
    parameters: int = 0

    def of_batch(self, batch: int | str) -> Workload:
        """Returns the work of a step of another batch.

        Args:
            batch: samples, 4096 or '4096', or a multiple of these: '2x'.

        Raises:
            ValueError: it is neither.
        """
        text = str(batch)
        try:
            if text.endswith("x"):
                samples = round(self.batch * float(text[:-1]))
            else:
                samples = int(text.replace("_", "").replace(",", ""))
            if not 1 <= samples <= MOST:
                raise ValueError
        except (ValueError, OverflowError):
            raise ValueError(
                f"batch {batch!r}: write a number from 1, or a multiple: '2x'; at most 2^63 - 1 "
                "samples."
            ) from None
        return dataclasses.replace(self, batch=samples)


def distinct_of_equally_likely(draws: float, values: float) -> float:
    """Returns how many different values are expected among independent draws of equally likely
    ones: V (1 - (1 - 1/V)^n)."""
    if values <= 1:
        return min(draws, values)
    return -values * math.expm1(draws * math.log1p(-1 / values))
