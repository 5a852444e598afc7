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
    from collective.checkpoint.consumers import Consumer
    from collective.checkpoint.storage import CheckpointStorageError

__all__ = [
    "CheckpointStorageError",
    "changes",
    "enable_increments",
    "read_table",
    "save_increment",
    "wait",
]
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
        path: a checkpoint's prefix, an increment's, or a folder, whose newest state is read.
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
    from collective.checkpoint import reading

    return reading.read_table(path, name, block, frequencies, last_used)


def enable_increments(folder: str) -> None:
    """Has increments follow the checkpoints that sessions of the default graph save in a folder.

    Call it while the graph is built, before a session runs it, on every rank. `save_increment` then
    saves what has changed since the last save. (`MonitoredTrainingSession` and Estimator have
    options for it, which call both.)

        checkpoint.enable_increments('model')
        saver = tf.train.Saver()
        with tf.Session() as session:
            ...
            saver.save(session, 'model/model.ckpt', global_step=step)
            ...
            checkpoint.save_increment(session, 'model')

    Args:
        folder: the checkpoints'.

    Raises:
        RuntimeError: the compiled operations are missing, or it is called eagerly.
    """
    from collective.checkpoint import increments

    increments.enable(folder)


def save_increment(session: Any, folder: str) -> str:
    """Saves what has changed since the last whole checkpoint, or increment, in a folder.

    That are the rows of tables and slots that were written, keys that are gone, and all other
    variables. It becomes `<checkpoint>.increment-<number>`. Every rank calls it, between the same
    two runs.

    Args:
        session: a session, also a `MonitoredSession`.
        folder: where it has saved a whole checkpoint, after `enable_increments(folder)`.

    Returns:
        The increment's prefix, which `Saver.restore` takes.

    Raises:
        ValueError: there is no whole checkpoint that it could follow.
    """
    from collective.checkpoint import increments
    from collective.ops.sessions import raw_session

    return increments.save(raw_session(session), folder)


def changes(consumer: str, slots: bool = False) -> Consumer:
    """Follows what changes of the tables of the default graph, for one consumer.

    Consumers have a cursor each, by their names: what one has taken the others still get, and
    increments of checkpoints take nothing from them. Call it while the graph is built, before a
    session runs it.

        serving = checkpoint.changes(consumer='serving')
        with tf.train.MonitoredTrainingSession('model') as session:
            ...
            with serving.take(session) as updates:        # between two runs, on every rank
                for name, update in updates.items():
                    send(name, update.whole, update.removed)
                    for keys, rows in update.blocks():
                        send(keys, rows)

    Args:
        consumer: its name.
        slots: gives the rows of optimizers' slots, too.

    Returns:
        The `collective.checkpoint.consumers.Consumer`.

    Raises:
        RuntimeError: the compiled operations are missing.
    """
    import tensorflow.compat.v1 as tf

    from collective.checkpoint import consumers

    return consumers.Consumer(consumer, tf.get_default_graph(), slots)


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
