"""Saves and restores sharded tables, in standard TensorFlow checkpoints, on all ranks in parallel.

In a program, TensorFlow's own `Saver`, `MonitoredTrainingSession(checkpoint_dir=…)` and so on do
it, inside scope(). Where no ranks run, this package reads the checkpoints:

    from collective import checkpoint

    for first, rows in checkpoint.read_table('model/model.ckpt-1000', 'user'):
        ...

So do `python -m collective.checkpoint show PATH` and `python -m collective.checkpoint consolidate
IN OUT`.

Checkpoints that are written beside training (`scope(checkpoint_blocking=False)`) are waited for by
`wait()`. `CheckpointStorageError` tells that a disk was full, say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collective.checkpoint.storage import CheckpointStorageError

__all__ = ["CheckpointStorageError", "read_table", "wait"]
BLOCK = 1 << 16


def read_table(
    path: str,
    name: str,
    block: int = BLOCK,
    frequencies: bool = False,
    last_used: bool = False,
) -> Iterator[tuple[Any, ...]]:
    """Reads a table, or a slot of one, by ascending keys, whatever number of ranks saved it.

    Args:
        path: a checkpoint's prefix, or a folder, whose latest checkpoint is read.
        name: the name of the table ('user'), or of the slot ('user/Adagrad').
        block: rows at a time, which bounds the memory.
        frequencies: yields how often training looked keys up, too, of a dynamic table that was
            saved with `TablePolicy(filter_freq=…)`. Keys without rows are in '<table>/refused',
            which is read like a slot; a Bloom filter doesn't know them.
        last_used: yields also the global steps to which the runs led that used the rows last, int64
            [b], of a dynamic table whose policy needs them (`collective.TablePolicy`). DeepRec
            calls them versions.

    Yields:
        (first, rows [b, D]) of a static table: the number of the first row; (keys [b], rows [b, D])
        of a dynamic one: int64 keys, ascending. b <= block. With `frequencies` (keys, rows,
        frequencies [b] int64).

    Raises:
        ValueError: there is no checkpoint, or no such table in it, or it has no frequencies or last
            uses.
    """
    from collective.checkpoint import table_reader

    return table_reader.read_table(path, name, block, frequencies, last_used)


def wait() -> None:
    """Waits until the checkpoints that are written beside training are there.

    Every rank calls it, between two runs. Without such a save (`scope(checkpoint_blocking=False)`)
    it returns at once.

    Raises:
        CheckpointStorageError: the storage failed, on some rank; raised on all alike.
        RuntimeError: something else failed.
    """
    from collective.checkpoint import background

    background.wait()


def __getattr__(name: str) -> Any:
    # TensorFlow is loaded where it is needed.
    if name == "CheckpointStorageError":
        from collective.checkpoint.storage import CheckpointStorageError

        return CheckpointStorageError
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
