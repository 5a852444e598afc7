"""Defines how a tensor relates to this rank's part of a table's gradient.

values [K, D] ── * 2 ──► ROWS [K, D] ── tf.reduce_sum ──► a number: of all ranks, once exchanged
indices [K] ──────────► IDS [K] ── tf.size ────────────► COUNT: of all ranks, once exchanged
                           └── tf.unique ──► IDS, PLACES
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping


class Kind(enum.Enum):
    """Tells how a tensor relates to this rank's rows.

    Attributes:
        ROWS: its first dimension is of them.
        IDS: so it is, and its numbers are ids of the table.
        LOCAL: so it is, and its numbers are rows of the shard.
        PLACES: so it is, and its numbers are places in another part.
        COUNT: it is how many rows there are, times what isn't a part.
        SHAPE: it is a shape, which begins with how many rows there are.
    """

    ROWS = "rows"
    IDS = "ids"
    LOCAL = "local rows"
    PLACES = "places"
    COUNT = "count"
    SHAPE = "shape"


BY_ROW = frozenset({Kind.ROWS, Kind.IDS, Kind.LOCAL, Kind.PLACES})
SIZES = frozenset({Kind.COUNT, Kind.SHAPE})


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Describes the result of an operation on parts.

    Attributes:
        outputs: the kinds of its outputs, by their numbers; the others are the same on all ranks.
        reduces: it reduces the rows of its first input.
        gathered: the inputs to replace by the rows of all ranks.
        counted: the inputs to replace by the sum over ranks.
        refused: why the result can't be determined; '' if it can.
    """

    outputs: Mapping[int, Kind] = dataclasses.field(default_factory=dict)
    reduces: bool = False
    gathered: tuple[int, ...] = ()
    counted: tuple[int, ...] = ()
    refused: str = ""


NOTHING = Verdict()
MIXES = Verdict(refused="it mixes rows")


def by_row(*kinds: Kind) -> Verdict:
    """Returns the verdict on an operation with outputs of these kinds."""
    return Verdict(dict(enumerate(kinds)))


@dataclasses.dataclass(frozen=True)
class Part:
    """Describes a tensor that is computed from this rank's part of a table's gradient.

    Attributes:
        kind: what it says of this rank's rows.
        table: the table's name.
        calls: the numbers of the calls of `tf.gradients` that it comes from.
        owners: which rank owns a key: the same for all static tables (`owners_of`).
    """

    kind: Kind
    table: str
    calls: frozenset[int]
    owners: str
