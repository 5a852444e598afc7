"""Compares what ranks write to a table without a function, before any of them writes.

Each rank keeps its own rows of what it is given: a write by one rank alone, or of other values,
would change some rows and leave others.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from collective.coordination import barrier
from collective.ops.communication import collectives
from collective.tables import dense_view

DIFFERENT = (
    "table '{table}': ranks 0 and {value} give different values for one assignment, of which each "
    "rank would keep its own rows. Give the same on every rank "
    "(horovod.tensorflow.broadcast(values, 0) has those of rank 0)"
)


def compare(table: Any, what: str, *values: np.ndarray, message: str = DIFFERENT) -> None:
    """Returns once all ranks have called it with the same values.

    Args:
        table: the table that will be written.
        what: names the change, for errors.
        values: what is written.
        message: of the error, with places for `table` and `value`, a rank.

    Raises:
        ValueError: another rank gives other values; on every rank.
        RankError: another rank does something else.
    """
    if collectives.size() == 1:
        return
    name = str(table.op.name)
    said = barrier.exchange(None, f"{what} of the table '{name}'", {"digest": digest(*values)})
    for rank, each in enumerate(said):
        if each["digest"] != said[0]["digest"]:
            raise ValueError(message.format(table=name, value=rank))


def digest(*values: np.ndarray) -> int:
    """Returns 63 bits that depend on all bytes of the values, and on their shapes."""
    hashed = hashlib.blake2b(digest_size=8)
    for value in values:
        hashed.update(str(value.shape).encode())
        hashed.update(np.ascontiguousarray(value).view(np.uint8).data)
    return int.from_bytes(hashed.digest(), "little") >> 1


dense_view.connect(compare)
