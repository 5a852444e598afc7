"""Notices that Python hashes strings differently on each rank.

The launcher gives all ranks one PYTHONHASHSEED; another one, or none, may not. `hash(word)` is then
another number on each rank, and a set of texts has another order. Each rank says at the first
meeting of all (`barrier.exchange`), in what it says there anyway, what a text hashes to.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from collective.ops.communication import collectives

_TEXT = "collective"
_KEY = "hash"


class HashCheck:
    """Compares once in a process what ranks hash a text to."""

    def __init__(self) -> None:
        self._is_told = False

    def beside(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Returns what this rank says at a meeting: `payload`, and the hash at the first one."""
        if self._is_told:
            return payload
        self._is_told = True
        return {**payload, _KEY: hash_of_text()}

    def compare(self, payloads: Sequence[dict[str, Any]]) -> None:
        """Takes the hashes out of what ranks have said; rank 0 warns if they differ."""
        hashes = [payload.pop(_KEY, None) for payload in payloads]
        others = [rank for rank, each in enumerate(hashes) if each != hashes[0]]
        if not others or None in hashes or collectives.rank() != 0:
            return
        warnings.warn(
            f"Python hashes strings differently on each rank: hash({_TEXT!r}) is {hashes[0]} on "
            f"rank 0 and {hashes[others[0]]} on rank {others[0]}. So words that a script hashes "
            "itself become different rows of a table on each rank, and a set of names has another "
            "order. Start all ranks with the same PYTHONHASHSEED in their environment, as "
            "`collective launch` does: PYTHONHASHSEED=0. "
            "warnings.filterwarnings('ignore', 'Python hashes strings') silences this.",
            stacklevel=4,
        )


def hash_of_text() -> int:
    """Returns what a text hashes to in this process."""
    return hash(_TEXT)


CHECK = HashCheck()
