"""Chooses one folder for all ranks if a script names it only on rank 0, or a different one on each.

Scripts for Horovod name a folder only on rank 0, which saves for all. In this library every rank
saves and restores its shards in one folder, and a script means rank 0's.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination import barrier
from collective.errors import RankError
from collective.ops.communication import collectives
from collective.tensorflow_internals.checkpoints import checkpoint_management

# Are told a folder of this rank that gives way to rank 0's, and rank 0's.
listeners: list[Callable[[str, str], None]] = []


def settle(doing: str, argument: str, folder: Any, stacklevel: int) -> Any:
    """Returns the folder that all ranks use: rank 0's, as every rank learns here.

    Rank 0 warns if another rank named a different folder, or none. Every rank calls it.

    Args:
        doing: says what the ranks do; the same on every rank.
        argument: the name of the argument that has the folder, for messages.
        folder: this rank's: a path, or None.
        stacklevel: of the warning, as for `warnings.warn`, from the caller's view.

    Raises:
        RankError: rank 0 has no folder but another rank has, or no checkpoint in its folder but
        another rank has one, or can't make its folder. tf.errors.OpError: on rank 0, the reason why
        it can't.
    """
    own = os.fsdecode(folder) if folder else None
    folders = barrier.run_on_all_ranks(None, doing, lambda: _usable(own))
    return rank_0s(doing, argument, folders, folder, stacklevel + 1)


def rank_0s(
    doing: str, argument: str, folders: Sequence[str | None], folder: Any, stacklevel: int
) -> Any:
    """Returns rank 0's folder like `settle`, where ranks have told each other theirs, `folders`."""
    own = folders[collectives.rank()]
    first, others = folders[0], [rank for rank, each in enumerate(folders) if each != folders[0]]
    if not others:
        return folder
    differs = f"{argument} is {first!r} on rank 0 and {folders[others[0]]!r} on rank {others[0]}"
    if first is None:
        raise RankError(
            f"{doing}: {differs}. All ranks save and restore in rank 0's folder: name it on "
            "every rank."
        )
    _refuse_other_checkpoints(doing, differs, argument, folders, own)
    if collectives.rank() == 0:
        warnings.warn(
            f"{doing}: {differs}. Every rank saves and restores its shards of the tables, so all "
            f"of them use rank 0's folder. Give every rank {argument}={first!r} to silence this.",
            stacklevel=stacklevel + 1,
        )
    if own is not None and own != first:
        for listener in listeners:
            listener(own, first)
    return first


def _usable(folder: str | None) -> str | None:
    """Returns the folder, which rank 0 makes.

    TensorFlow would make it later, on each rank separately: an error would occur only on that rank.
    """
    if folder is not None and collectives.rank() == 0:
        tf.io.gfile.makedirs(folder)
    return folder


def _refuse_other_checkpoints(
    doing: str, differs: str, argument: str, folders: Sequence[str | None], own: str | None
) -> None:
    """Raises an error if rank 0's folder has no checkpoint, but another rank's has one.

    Training would silently start again.
    """

    def latest_checkpoint() -> str | None:
        latest: str | None = own and checkpoint_management.latest_checkpoint(own)
        return latest

    latest_by_rank = barrier.run_on_all_ranks(
        None, f"{doing}: looking for checkpoints", latest_checkpoint
    )
    if latest_by_rank[0] is not None:
        return
    for rank, latest in enumerate(latest_by_rank):
        if latest is not None:
            raise RankError(
                f"{doing}: {differs}. All ranks would use rank 0's folder, but it has no "
                f"checkpoint, and that of rank {rank}, {folders[rank]!r}, has one. Give every rank "
                f"the right {argument}."
            )
