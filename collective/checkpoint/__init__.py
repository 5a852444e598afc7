"""Saves and restores sharded tables, in standard TensorFlow checkpoints, on all ranks in parallel.

In a program, TensorFlow's own `Saver`, `MonitoredTrainingSession(checkpoint_dir=…)` and so on do
it, inside scope(). Where no ranks run, this package reads the checkpoints:

    from collective import checkpoint

    model = checkpoint.load('model/model.ckpt-1000')
    model['dense/kernel'], model['user'][[3, 5]]
    for first, rows in checkpoint.read_table('model/model.ckpt-1000', 'user'):
        ...

So do `collective checkpoint show PATH` and `collective checkpoint consolidate
IN OUT`. `collective checkpoint import deeprec IN OUT`, and `hybridbackend`, and `sok`,
make checkpoints of this library of those of other frameworks.

`Saver` is TensorFlow's with options of its own. Checkpoints that are written during training
(`scope(checkpoint_blocking=False)`) are waited for by `wait()`. `CheckpointStorageError` tells that
a disk was full, say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from collective.options import WarmStart

if TYPE_CHECKING:
    from collective.checkpoint.files.storage import CheckpointStorageError
    from collective.checkpoint.importing.conversion import Report
    from collective.checkpoint.reading.loaded import LoadedCheckpoint
    from collective.checkpoint.saving.best import KeepBest
    from collective.checkpoint.saving.consumers import Consumer
    from collective.checkpoint.saving.saved_code import SavedCode
    from collective.checkpoint.saving.saver_options import Saver

__all__ = [
    "CheckpointStorageError",
    "KeepBest",
    "Saver",
    "WarmStart",
    "changes",
    "enable_increments",
    "import_checkpoint",
    "keep_best",
    "load",
    "load_code",
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
    from collective.checkpoint.reading import opening

    return opening.read_table(path, name, block, frequencies, last_used)


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
    from collective.checkpoint.saving import increments

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
        ValueError: there is no whole checkpoint that it could follow, or it is the latest no more.
        CheckpointStorageError: the storage failed, or that checkpoint is gone.
    """
    from collective.checkpoint.saving import increments
    from collective.ops.graph.sessions import raw_session

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

    All ranks call it, after an evaluation in a loop, or in `after_save` of a
    `tf.train.CheckpointSaverListener`; rank 0's value counts. An Estimator does it by itself:
    `strategy.estimator(…, keep_best=('auc', 'max', 3))`.

    What is kept are hard links, where the file system has them: the Saver's `max_to_keep` doesn't
    reach them. `best/checkpoint` names the best one as the latest, so the folder can be restored,
    exported and loaded as any other. The record is in files, and goes on when the job is started
    again. Of checkpoints with equal values the one that came first is better; one whose value is
    NaN isn't kept.

    Args:
        path: the checkpoint's prefix, or a folder, whose latest it is.
        metrics: {name: value}, as `Estimator.evaluate` returns them.
        best: (metric, 'max' or 'min', how many are kept), or a `KeepBest`.

    Returns:
        Whether it is kept; the same on all ranks.

    Raises:
        ValueError: there is no such metric, or no checkpoint, or the folder has the best by another
            metric.
        RankError: it failed on rank 0.
    """
    from collective.checkpoint.saving import best as best_checkpoints

    return best_checkpoints.keep_best(path, metrics, best)


def load(path: str) -> LoadedCheckpoint:
    """Opens a checkpoint for looking into it: a mapping of names, without ranks or Horovod.

        model = collective.checkpoint.load('ckpt')
        print(model)                        # its tables and variables
        model['dense/kernel']               # an array
        user = model['user']                # a table: nothing is read yet
        user[[3, 5]]                        # [2, D], the rows of these keys
        user.lookup(keys, default=0.0)      # zeros for keys that there aren't
        for keys, rows in user.blocks():    # all of it, by ascending keys
            ...

    Args:
        path: a checkpoint's prefix, or a folder, whose latest checkpoint is opened.

    Returns:
        A mapping. A table or slot ('user/Adagrad') is an object with `shape`, `dim`, `dtype`,
        `dynamic`, `slots`, `keys()`, `lookup(keys)`, `[keys]`, `key in …`, `blocks()`; as an array
        (`numpy.asarray`) it is read whole. Any other variable is an array, read at each access.
        `tables` and `variables` list the names of either; `table(name)` reads a matrix of plain
        TensorFlow's row by row.

    Raises:
        ValueError: there is no checkpoint.
        tf.errors.DataLossError: it is damaged.
    """
    from collective.checkpoint.reading import loaded

    return loaded.LoadedCheckpoint(path)


def load_code(path: str) -> SavedCode:
    """Finds the code that `scope(save_code=True)` saved next to checkpoints.

    It is the script and the .py, .yaml, .json and .toml files below its folder, as they were when
    the job saved its first checkpoint; of several jobs in one folder, the last one's. To build the
    model outside of training, and fill it:

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
        ValueError: there is none, or a file was changed since, or is missing.
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
    """Makes a checkpoint of this library of one of another framework.

    Embedding variables and SOK's dynamic variables become dynamic tables, with their slots, how
    often keys came and when they were used last; sharded and partitioned variables become static
    tables; ordinary variables stay as they are. Any number of ranks restores it. It appears whole,
    or not at all, and is the latest of its folder if that has had none. Memory is about 500 MB;
    next to `target` there must be room for the largest table once more.

    Args:
        framework: wrote it: 'deeprec', 'hybridbackend' or 'sok'.
        path: a checkpoint's prefix, or a folder, whose latest checkpoint is read; of SOK the folder
            of the dump.
        target: the new checkpoint's prefix.
        names: {old name: new name}. One `*` in an old name stands for any text, and for the same in
            the new one. None for a new name leaves the variable out. Slots follow their table. Or a
            function from an old name to a new one.
        slots: takes optimizers' slots, too.
        in_order: of HybridBackend, names of variables that are in slices but not sharded.
        kinds: of SOK, {table: 'static' or 'dynamic'} for tables whose keys are 0 … V - 1, which
            are taken for static otherwise.
        dense: of SOK, a TensorFlow checkpoint with the other variables.

    Returns:
        What was taken under which name, and what was left out, and why; `str()` of it is a text.

    Raises:
        ValueError: there is no such checkpoint, or there is one `target`; a part of it is missing
            or damaged; a name in `names` is no variable's, or two variables would have one.
    """
    from collective.checkpoint.importing import frameworks

    return frameworks.import_checkpoint(
        framework, path, target, names, slots, in_order=in_order, kinds=kinds, dense=dense
    )


def wait() -> None:
    """Waits until the checkpoints that are written during training are there.

    Every rank calls it, between two runs. Without such a save (`scope(checkpoint_blocking=False)`)
    it returns at once.

    Raises:
        CheckpointStorageError: the storage failed, on some rank; raised on all alike.
        RuntimeError: something else failed.
    """
    from collective.checkpoint.saving import background

    background.wait()


def __getattr__(name: str) -> Any:
    # They need TensorFlow, or what the package itself can do without.
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
