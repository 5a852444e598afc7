"""Saves and restores sharded tables, in standard TensorFlow checkpoints, on all ranks in parallel.

In a program, use TensorFlow's own `Saver`, `MonitoredTrainingSession(checkpoint_dir=…)` and so on
inside scope(). To read checkpoints without ranks, use this package:

    from collective import checkpoint

    model = checkpoint.load('model/model.ckpt-1000')
    model['dense/kernel'], model['user'][[3, 5]]
    for first, rows in checkpoint.read_table('model/model.ckpt-1000', 'user'):
        ...

So do `collective checkpoint show PATH` and `collective checkpoint consolidate IN OUT`. `collective
checkpoint import deeprec IN OUT` (or `hybridbackend`, or `sok`) converts checkpoints of other
frameworks.

`Saver` is TensorFlow's with more options. `wait()` waits for checkpoints that are written during
training (`scope(checkpoint_blocking=False)`). `CheckpointStorageError` is raised, for example, if a
disk is full.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from collective.options.scopes import WarmStart

if TYPE_CHECKING:
    from collective.checkpoint.files.storage import CheckpointStorageError
    from collective.checkpoint.importing.conversion import Report
    from collective.checkpoint.reading.loaded import LoadedCheckpoint
    from collective.checkpoint.saving.best import KeepBest
    from collective.checkpoint.saving.consumers import Consumer
    from collective.checkpoint.saving.saved_code import SavedCode
    from collective.checkpoint.saving.saver_options import Saver
    from collective.tables.table import Table

__all__ = [
    "CheckpointStorageError",
    "KeepBest",
    "Saver",
    "WarmStart",
    "changes",
    "dump_tables",
    "enable_increments",
    "import_checkpoint",
    "keep_best",
    "load",
    "load_code",
    "load_tables",
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
    """Reads a table or a slot by ascending keys, however many ranks saved it.

    Args:
        path: a checkpoint's prefix, an increment's, or a folder, whose newest state is read.
        name: the name of the table ('user') or of the slot ('user/Adagrad').
        block: how many rows to read at a time, which bounds the memory.
        frequencies: whether to yield also how often training looked up keys, for a dynamic table
            that was saved with `TablePolicy(filter_freq=…)`. Keys without rows are in
            '<table>/refused', which is read like a slot; a Bloom filter doesn't know them.
        last_used: whether to yield also the global steps of the runs that used the rows last, int64
            [b], for a dynamic table whose policy needs them (`collective.TablePolicy`). DeepRec
            calls them versions.

    Yields:
        (first, rows [b, D]) for a static table: the number of the first row; (keys [b], rows [b,
        D]) for a dynamic table: int64 keys, ascending. b <= block. With `frequencies` (keys, rows,
        frequencies [b] int64).

    Raises:
        ValueError: there is no checkpoint, or no such table in it, or it has no frequencies or last
            uses.
    """
    from collective.checkpoint.reading import opening

    return opening.read_table(path, name, block, frequencies, last_used)


def enable_increments(folder: str) -> None:
    """Enables increments for the checkpoints that sessions of the default graph save in a folder.

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
        folder: the folder of the checkpoints.

    Raises:
        RuntimeError: the compiled operations are missing, or it is called eagerly.
    """
    from collective.checkpoint.saving import increments

    increments.enable(folder)


def save_increment(session: Any, folder: str) -> str:
    """Saves what has changed since the last whole checkpoint, or increment, in a folder.

    An increment has the rows of tables and slots that were written, the removed keys, and all other
    variables. It is named `<checkpoint>.increment-<number>`. Call it on every rank, between the
    same two runs.

    Args:
        session: a session, also a `MonitoredSession`.
        folder: the folder where the session has saved a whole checkpoint, after
            `enable_increments(folder)`.

    Returns:
        The increment's prefix, which `Saver.restore` takes.

    Raises:
        ValueError: there is no whole checkpoint that it could follow, or that is no longer the
            latest.
        CheckpointStorageError: storage failed, or that checkpoint is gone.
    """
    from collective.checkpoint.saving import increments
    from collective.ops.graph.sessions import raw_session

    return increments.save(raw_session(session), folder)


def changes(consumer: str, slots: bool = False) -> Consumer:
    """Follows the changes of the default graph's tables, for one consumer.

    Each named consumer has its own cursor, independent of other consumers and of increments of
    checkpoints. Call it while the graph is built, before a session runs it.

        serving = checkpoint.changes(consumer='serving')
        with tf.train.MonitoredTrainingSession('model') as session:
            ...
            with serving.take(session) as updates:        # between two runs, on every rank
                for name, update in updates.items():
                    send(name, update.whole, update.removed)
                    for keys, rows in update.blocks():
                        send(keys, rows)

    Args:
        consumer: the consumer's name.
        slots: whether to include the rows of optimizers' slots.

    Returns:
        The `collective.checkpoint.saving.consumers.Consumer`.

    Raises:
        RuntimeError: the compiled operations are missing.
    """
    import tensorflow.compat.v1 as tf

    from collective.checkpoint.saving import consumers

    return consumers.Consumer(consumer, tf.get_default_graph(), slots)


def keep_best(
    path: str,
    metrics: Mapping[str, Any],
    best: tuple[str, str] | tuple[str, str, int] | KeepBest,
) -> bool:
    """Keeps a checkpoint in the folder `best` next to it, if it is among the best so far.

    Call it on all ranks, after an evaluation in a loop, or in `after_save` of a
    `tf.train.CheckpointSaverListener`; rank 0's value counts. An Estimator does it automatically:
    `strategy.estimator(…, keep_best=('auc', 'max', 3))`.

    The kept checkpoints are hard links if the file system supports them, so the Saver's
    `max_to_keep` doesn't affect them. `best/checkpoint` names the best one as the latest, so the
    folder can be restored, exported and loaded like any other. The record is in files, and
    continues when the job is restarted. Of checkpoints with equal values the first is better; a
    checkpoint whose value is NaN isn't kept.

    Args:
        path: the checkpoint's prefix, or a folder, whose latest checkpoint is used.
        metrics: {name: value}, as `Estimator.evaluate` returns them.
        best: (metric, 'max' or 'min', how many to keep), or a `KeepBest`.

    Returns:
        Whether it is kept; the same on all ranks.

    Raises:
        ValueError: there is no such metric, or no checkpoint, or the folder has the best
            checkpoints by another metric.
        RankError: it failed on rank 0.
    """
    from collective.checkpoint.saving import best as best_checkpoints

    return best_checkpoints.keep_best(path, metrics, best)


def load(path: str) -> LoadedCheckpoint:
    """Opens a checkpoint for inspection as a mapping of names, without ranks or Horovod.

        model = collective.checkpoint.load('ckpt')
        print(model)                        # its tables and variables
        model['dense/kernel']               # an array
        user = model['user']                # a table: nothing is read yet
        user[[3, 5]]                        # [2, D], the rows of these keys
        user.lookup(keys, default=0.0)      # zeros for missing keys
        for keys, rows in user.blocks():    # all of it, by ascending keys
            ...

    Args:
        path: a checkpoint's prefix, or a folder, whose latest checkpoint is opened.

    Returns:
        A mapping. A table or slot ('user/Adagrad') is an object with `shape`, `dim`, `dtype`,
        `dynamic`, `slots`, `keys()`, `lookup(keys)`, `[keys]`, `key in …`, `blocks()`; converting
        it to an array (`numpy.asarray`) reads it whole. Any other variable is an array, read at
        each access. `tables` and `variables` list their names; `table(name)` reads a matrix of
        plain TensorFlow row by row.

    Raises:
        ValueError: there is no checkpoint.
        tf.errors.DataLossError: it is damaged.
    """
    from collective.checkpoint.reading import loaded

    return loaded.LoadedCheckpoint(path)


def load_code(path: str) -> SavedCode:
    """Finds the code that `scope(save_code=True)` saved next to checkpoints.

    It is the script and the .py, .yaml, .json and .toml files below its folder, as they were when
    the job saved its first checkpoint; if several jobs used the folder, those of the last job. To
    build the model outside of training, and restore it:

        code = collective.checkpoint.load_code('ckpt')
        with code.importable():
            import model                    # the job's own module, not a newer one
            build = model.build
        with strategy.scope(), tf.Graph().as_default():
            build()
            saver = tf.train.Saver()
            with tf.Session() as session:
                saver.restore(session, tf.train.latest_checkpoint('ckpt'))

    Args:
        path: a checkpoint's prefix, or its folder.

    Returns:
        An object with `folder`, `script`, `manifest` (arguments, versions, scope's options, ranks,
        hashes of all files, and which weren't saved and why), `module(name)`, and `importable()`.
        Nothing of the environment is in it; arguments that are named like secrets are `***`.

    Raises:
        ValueError: there is no saved code, or a file has changed since or is missing.
    """
    from collective.checkpoint.saving import saved_code

    return saved_code.load_code(path)


def import_checkpoint(
    framework: Literal["deeprec", "hybridbackend", "sok"],
    path: str,
    target: str,
    names: Mapping[str, str | None] | Callable[[str], str | None] | None = None,
    slots: bool = True,
    *,
    in_order: Collection[str] = (),
    kinds: Mapping[str, str] | None = None,
    dense: str | None = None,
) -> Report:
    """Converts a checkpoint of another framework to one of this library.

    Embedding variables and SOK's dynamic variables become dynamic tables, with their slots, how
    often keys came and when they were used last; sharded and partitioned variables become static
    tables; ordinary variables are unchanged. Any number of ranks can restore it. It appears whole
    or not at all, and becomes the latest checkpoint of its folder if there was none. It needs about
    500 MB of memory, and disk space next to `target` for one more copy of the largest table.

    Args:
        framework: the framework that wrote it: 'deeprec', 'hybridbackend' or 'sok'.
        path: a checkpoint's prefix, or a folder, whose latest checkpoint is read; for SOK the
            folder of the dump.
        target: the new checkpoint's prefix.
        names: {old name: new name}. One `*` in an old name stands for any text, and for the same
            text in the new name. None for a new name leaves the variable out. Slots follow their
            table. Or a function from an old name to a new one.
        slots: whether to convert optimizers' slots.
        in_order: for HybridBackend, names of variables that are in slices but not sharded.
        kinds: for SOK, {table: 'static' or 'dynamic'} for tables whose keys are 0 … V - 1, which
            are static otherwise.
        dense: for SOK, a TensorFlow checkpoint with the other variables.

    Returns:
        What was converted under which name, and what was left out, and why; `str()` formats it.

    Raises:
        ValueError: there is no such checkpoint, or `target` exists; a part of it is missing or
            damaged; a name in `names` isn't a variable's, or two variables would have the same
            name.
    """
    from collective.checkpoint.importing import reader_choice

    return reader_choice.import_checkpoint(
        framework, path, target, names, slots, in_order=in_order, kinds=kinds, dense=dense
    )


def dump_tables(
    session: Any,
    path: str | os.PathLike[str],
    tables: Collection[str | Table] | None = None,
    *,
    slots: bool = True,
    global_step: int | None = None,
) -> str:
    """Saves the tables of a session alone, without the network; also while it trains.

    It is a checkpoint: complete or not there, of any number of ranks, for `load_tables`,
    `read_table`, `load` and `collective checkpoint show`. A dump of the same name is replaced.
    A job doesn't continue from it, and no Saver removes it. Variables of the network, and numbers
    of an optimizer that belong to no row (Adam's beta powers), aren't in it. With
    `scope(checkpoint_blocking=False)` it is written during training, and `wait` waits for it. A
    policy that evicts rows at saves does so here, too.

    Call it on every rank, between the same two runs. It is PERSIA's `dump_embedding`.

        with tf.train.MonitoredTrainingSession() as session:
            ...
            checkpoint.dump_tables(session, 'dumps/tables')

    Args:
        session: a session in scope(), also a `MonitoredSession`.
        path: the prefix of the checkpoint.
        tables: which ones, by name or as they are; None: all of the graph.
        slots: whether to save their optimizers' slots, too.
        global_step: is added to the prefix: `<path>-<global_step>`.

    Returns:
        The prefix.

    Raises:
        RuntimeError: it is called outside of scope().
        ValueError: the graph has no such table.
        CheckpointStorageError: storage failed, on whichever rank.
    """
    from collective.checkpoint.saving import table_dump

    return table_dump.dump(session, path, tables, slots, global_step)


def load_tables(
    session: Any,
    path: str | os.PathLike[str],
    tables: Collection[str | Table] | None = None,
    *,
    slots: bool = True,
) -> list[str]:
    """Takes the tables of a session, and nothing else, from a dump or a whole checkpoint.

    The rows of a dynamic table are replaced, as by a restore. Call it on every rank, between the
    same two runs. When it returns, the tables are loaded. It is PERSIA's `load_embedding`.

    Args:
        session: a session in scope(), also a `MonitoredSession`.
        path: the prefix of a checkpoint, saved on any number of ranks.
        tables: which ones, by name or as they are; None: all of the graph.
        slots: whether to take their optimizers' slots, too. A dynamic table's new rows have the
            slots' initial values otherwise.

    Returns:
        The names of the tables, sorted.

    Raises:
        RuntimeError: it is called outside of scope().
        ValueError: the graph has no such table, or the checkpoint lacks one, or a slot of one; with
            `scope(missing_slots='fresh')` such slots get their initial values.
    """
    from collective.checkpoint.saving import table_dump

    return table_dump.load(session, path, tables, slots)


def wait() -> None:
    """Waits until checkpoints that are being written during training are complete.

    Call it on every rank, between two runs. Without such a save
    (`scope(checkpoint_blocking=False)`) it returns at once.

    Raises:
        CheckpointStorageError: storage failed on a rank; raised on all ranks.
        RuntimeError: something else failed.
    """
    from collective.checkpoint.saving import background

    background.wait()


def __getattr__(name: str) -> Any:
    # These need TensorFlow, or other modules that the package itself can do without.
    if name == "KeepBest":
        from collective.checkpoint.saving import best

        return best.KeepBest
    if name == "Saver":
        from collective.checkpoint.saving import saver_options

        return saver_options.Saver
    if name == "CheckpointStorageError":
        from collective.checkpoint.files import storage

        return storage.CheckpointStorageError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
