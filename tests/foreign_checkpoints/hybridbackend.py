"""Writes sharded variables as HybridBackend does.

Source: HybridBackend's `embedding/variables.py`: on N ranks, shard s has V div N rows, and one more
if s < V mod N; its place in the entry [V, D] is after those of the shards before it.
`embedding/sharding.py`: key k is row k div N of shard k mod N.
"""

from __future__ import annotations

import numpy as np

from tests.foreign_checkpoints import deeprec


def write(
    prefix: str,
    entries: dict[str, np.ndarray],
    sharded: dict[str, np.ndarray],
    ranks: int,
    partitioned: dict[str, tuple[np.ndarray, int]] | None = None,
) -> None:
    """Writes a checkpoint.

    Args:
        prefix: its path.
        entries: ordinary variables, by name.
        sharded: {name: [V, D], row k of key k}.
        ranks: N.
        partitioned: variables that TensorFlow cut, with the number of their slices.
    """
    slices = dict(partitioned or {})
    for name, rows in sharded.items():
        stored = np.concatenate([rows[shard::ranks] for shard in range(ranks)])
        slices[name] = stored, ranks
    deeprec.write(prefix, entries, slices)
