"""Notices that Python hashes strings differently on each rank.

The launcher gives all ranks the same PYTHONHASHSEED; other launchers may not. `hash(word)` then
differs between ranks, and a set of strings has a different order. At the first meeting of all ranks
(`barrier.exchange`), each rank adds the hash of a string to its payload.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from collective.ops.communication import collectives

_TEXT = "collective"
_KEY = "hash"


class HashCheck:
    """Compares the ranks' hashes of a string, once per process."""

    def __init__(self) -> None:
        self._is_told = False

    def added_to(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's payload of a meeting: `payload`, and the hash at the first."""
        if self._is_told:
            return payload
        self._is_told = True
        return {**payload, _KEY: hash_of_text()}

    def compare(self, payloads: Sequence[dict[str, Any]]) -> None:
        """Removes the hashes from the ranks' payloads; rank 0 warns if they differ."""
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
    """Returns the hash of a string in this process."""
    return hash(_TEXT)


CHECK = HashCheck()
