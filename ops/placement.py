"""Places the rows of tables on ranks. No other module knows which rank has which row.

    static table     key k is row k div N of rank k mod N               `static(N)`
      whole          key k is row k of one rank                         `static(N, rank)`
    dynamic table    key k is on rank mix(k) mod N, in a row store      `dynamic(N)`
      whole          key k is on one rank, in its row store             `dynamic(N, rank)`

What follows from this is here as well: how many rows a rank has, which rows of a whole table are
its own, which parts of a checkpoint can hold its keys. A checkpoint stores tables as the shards of
the ranks that saved it, so a stored table has a placement, too: over its parts.

Compiled operations have the same functions in `ops/native/placement.h`, CUDA kernels in
`ops/gpu/placement.cuh`. They are told a table's placement by its `kind`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops import key_hashing

# A number, an int64 or uint64 array, or an int64 tensor. Results are of the same kind.
Numbers = TypeVar("Numbers", int, np.ndarray)

# Kinds of tables. The kind of a table that rank r has whole is ON_ONE_RANK * (1 + r) more.
STATIC, DYNAMIC, ON_ONE_RANK = range(3)


def is_dynamic(kind: int) -> bool:
    """Tells whether a kind is a dynamic table's, shared or whole."""
    return kind % ON_ONE_RANK == DYNAMIC


def static(ranks: int, only: int | None = None) -> RowPlacement:
    """Returns the placement of a static table, or of its parts in a checkpoint.

    Args:
        ranks: N, the number of ranks or parts.
        only: the rank that has it whole, modulo N: a script for more ranks than there are runs,
            too. None if all ranks share it.
    """
    return ByRemainder(ranks) if only is None else RowsOnOneRank(ranks, only % ranks)


def dynamic(ranks: int, only: int | None = None) -> Placement:
    """Returns the placement of a dynamic table, or of its parts in a checkpoint.

    Args:
        ranks, only: as for `static`.
    """
    return ByHash(ranks) if only is None else OnOneRank(ranks, only % ranks)


@dataclasses.dataclass(frozen=True)
class Placement(abc.ABC):
    """Tells which rank owns a key.

    Placements of a class are equal if they place every key on the same rank.

    Attributes:
        ranks: N, the number of ranks, or of a stored table's parts.
    """

    ranks: int

    @property
    @abc.abstractmethod
    def kind(self) -> int:
        """Returns by what number compiled operations and kernels know it."""

    @property
    def holder(self) -> int | None:
        """Returns the rank that has all rows; None if ranks share them."""
        return None

    @property
    def parts(self) -> int:
        """Returns how many parts a checkpoint stores."""
        return self.ranks

    def part(self, rank: int) -> int | None:
        """Returns which part of a checkpoint has the rows of `rank`; None if it has no rows."""
        return rank

    def share(self, rank: int, rows: int) -> int:
        """Returns how many of `rows` rows are the share of `rank`, wherever their keys are."""
        part = self.part(rank)
        return 0 if part is None else static(self.parts).count(part, rows)

    @abc.abstractmethod
    def remainder(self, rank: int) -> tuple[int, int] | None:
        """Returns (r, m) if `rank` has the keys that are r modulo m; None if it has none.

        Of a dynamic table it is about mixed keys.
        """

    @abc.abstractmethod
    def owner(self, keys: np.ndarray) -> np.ndarray:
        """Returns the ranks, int32 [K], that own the int64 `keys` [K]. They may be negative."""

    @abc.abstractmethod
    def owner_tensor(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns `owner` of a tensor, by TensorFlow's own operations."""

    def may_hold(self, parts: np.ndarray, other: Placement, rank: int) -> np.ndarray:
        """Tells which of `parts` can have a key that another placement has on `rank`.

        Args:
            parts: ranks of this placement, which is over all of them: a stored table's.
            other: a placement of a table of the same keys.
            rank: one of its ranks.
        """
        theirs = other.remainder(rank)
        if theirs is None:
            return np.zeros(np.shape(parts), bool)
        # A number can have both remainders if they are equal modulo the greatest common divisor.
        remainder, modulus = theirs
        step = math.gcd(self.ranks, modulus)
        return np.asarray(parts) % step == remainder % step

    def parts_of(self, other: Placement, rank: int) -> Sequence[int]:
        """Returns the ranks of this placement that can hold keys of `rank` of another one."""
        is_part = self.may_hold(np.arange(self.ranks), other, rank)
        return [int(part) for part in np.flatnonzero(is_part)]


class CommonRows(NamedTuple):
    """Describes the rows of one shard that another placement has in one shard, too.

    Attributes:
        first: the first of these rows.
        step: the distance to the next; so they are rows `first`, `first + step`, ….
        other_step: the distance of the same rows in the other shard.
    """

    first: int
    step: int
    other_step: int


class RowPlacement(Placement):
    """Tells which rank owns a key of a static table, and which row of its shard the key has.

    A subclass is a way to place the rows of static tables. The keys of a table are the numbers of
    its rows. A shard has its rows by ascending keys.

    Attributes:
        strategy: TensorFlow's name of it, for the `partition_strategy` of `embedding_lookup`, by
            which a served model reads its parts.
    """

    strategy: str

    @abc.abstractmethod
    def row(self, keys: Numbers) -> Numbers:
        """Returns the rows of `keys` in their owners' shards."""

    @abc.abstractmethod
    def key(self, rank: int, rows: Numbers) -> Numbers:
        """Returns the keys of `rows` in the shard of `rank`."""

    @abc.abstractmethod
    def count(self, rank: int, rows: int) -> int:
        """Returns how many of the first `rows` rows of a table `rank` has."""

    @abc.abstractmethod
    def rows_of(self, rank: int, first: int = 0) -> slice:
        """Returns the slice that takes the rows of `rank` from rows of the table.

        Args:
            rank: the rank.
            first: the number of the row in the table with which these begin.
        """

    @abc.abstractmethod
    def common(self, part: int, other: RowPlacement, rank: int) -> CommonRows | None:
        """Finds the rows of the shard `part` that are also on `rank` of another placement.

        Returns:
            The rows, as if the shard had no end; None if there are none.
        """

    def counts(self, rows: int) -> list[int]:
        """Returns how many rows of a table with `rows` rows each rank has: N numbers."""
        return [self.count(rank, rows) for rank in range(self.ranks)]

    def keys(self, rank: int, rows: int) -> np.ndarray:
        """Returns the keys of all rows of `rank`, of a table with `rows` rows: ascending, int64."""
        return self.key(rank, np.arange(self.count(rank, rows), dtype=np.int64))


class ByRemainder(RowPlacement):
    """Places key k of a static table on rank k mod N, as row k div N of its shard."""

    strategy = "mod"
    kind = STATIC

    def remainder(self, rank: int) -> tuple[int, int]:
        return rank, self.ranks

    def owner(self, keys: np.ndarray) -> np.ndarray:
        return (keys % self.ranks).astype(np.int32)

    def owner_tensor(self, keys: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.math.floormod(keys, self.ranks), tf.int32)

    def row(self, keys: Numbers) -> Numbers:
        return keys // self.ranks

    def key(self, rank: int, rows: Numbers) -> Numbers:
        return rows * self.ranks + rank

    def count(self, rank: int, rows: int) -> int:
        return len(range(rank, rows, self.ranks))

    def rows_of(self, rank: int, first: int = 0) -> slice:
        return slice((rank - first) % self.ranks, None, self.ranks)

    def common(self, part: int, other: RowPlacement, rank: int) -> CommonRows | None:
        theirs = other.remainder(rank)
        if theirs is None:
            return None
        remainder, modulus = theirs
        step = modulus // math.gcd(self.ranks, modulus)
        for first in range(step):
            if self.key(part, first) % modulus == remainder:
                return CommonRows(first, step, other.row(self.ranks * step))
        return None


@dataclasses.dataclass(frozen=True)
class OnOneRank(Placement):
    """Places all keys of a table on one rank: of a dynamic one, unless a subclass says otherwise.

    A checkpoint has such a table as one part. The other ranks have none of its rows, but take part
    in everything that ranks do together.

    Attributes:
        only: the rank.
    """

    only: int

    shared_kind: ClassVar[int] = DYNAMIC  # Of such a table that all ranks share.

    @property
    def kind(self) -> int:
        return self.shared_kind + (0 if self.ranks == 1 else ON_ONE_RANK * (1 + self.only))

    @property
    def holder(self) -> int:
        return self.only

    @property
    def parts(self) -> int:
        return 1

    def part(self, rank: int) -> int | None:
        return 0 if rank == self.only else None

    def remainder(self, rank: int) -> tuple[int, int] | None:
        return (0, 1) if rank == self.only else None

    def owner(self, keys: np.ndarray) -> np.ndarray:
        return np.full(keys.shape, self.only, np.int32)

    def owner_tensor(self, keys: tf.Tensor) -> tf.Tensor:
        return tf.fill(tf.shape(keys), self.only)


class RowsOnOneRank(OnOneRank, RowPlacement):
    """Places all rows of a static table on one rank; its row k is row k of the table.

    Its part of a checkpoint is what plain TensorFlow would save.
    """

    strategy = "mod"
    shared_kind = STATIC

    def row(self, keys: Numbers) -> Numbers:
        return keys

    def key(self, rank: int, rows: Numbers) -> Numbers:
        return rows

    def count(self, rank: int, rows: int) -> int:
        return rows if rank == self.only else 0

    def rows_of(self, rank: int, first: int = 0) -> slice:
        return slice(None) if rank == self.only else slice(0)

    def common(self, part: int, other: RowPlacement, rank: int) -> CommonRows | None:
        return None if part != self.only else static(1).common(0, other, rank)


class ByHash(Placement):
    """Places key k of a dynamic table on rank mix(k) mod N, as `key_hashing` mixes it."""

    kind = DYNAMIC

    def remainder(self, rank: int) -> tuple[int, int]:
        return rank, self.ranks

    def owner(self, keys: np.ndarray) -> np.ndarray:
        return (key_hashing.mix_np(keys) % np.uint64(self.ranks)).astype(np.int32)

    def owner_tensor(self, keys: tf.Tensor) -> tf.Tensor:
        if self.ranks == 1:
            return tf.zeros_like(keys, tf.int32)
        mixed = key_hashing.mix(keys)
        return tf.cast(tf.math.floormod(mixed, tf.constant(self.ranks, tf.uint64)), tf.int32)
