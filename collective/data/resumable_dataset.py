"""Deals global batches of a dataset to the ranks, and resumes after those of a checkpoint."""

from __future__ import annotations

import re
from typing import Any, Callable, Protocol

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.data import dataset_analysis, dealt_input
from collective.data.positions import ON_CHANGE, DataSource, OnChange, position_of
from collective.ops.communication import collectives
from collective.ops.graph import graphs
from collective.policy import is_whole

# TensorFlow's names of operations.
_DEALER = dealt_input.Dealer(
    "collective.data.resumable(): what it reads, or an option,",
    "records of a batch",
    "Sort a list of files, and give all ranks the same options.",
)
_NAME = re.compile("[A-Za-z0-9.][A-Za-z0-9_./-]*")

Batch = Callable[[tf2.data.Dataset, int], tf2.data.Dataset]


class SeekableRecords(Protocol):
    """Gives random access to a dataset's records (the attribute `collective_records` of one).

    Attributes:
        records: how many an epoch has.
        epochs: how often they are read; None: without end.
        seed: of their order; None: they aren't shuffled.
        digest: 63 bits of everything else that their order depends on.
    """

    records: int
    epochs: int | None
    seed: int | None
    digest: int

    def batches(
        self, first: tf.Tensor, batch_size: int, drop_remainder: bool, rank: int, ranks: int
    ) -> tf2.data.Dataset:
        """Returns a rank's parts of the global batches from number `first` on."""


def resumable(
    dataset: tf2.data.Dataset,
    batch_size: int,
    *,
    name: str = "data",
    start: int = 0,
    drop_remainder: bool = False,
    batch: Batch | None = None,
    on_change: OnChange = "error",
) -> tf2.data.Dataset:
    """Makes a dataset of this rank's part of global batches, which resumes where a job stopped.

        records = tf.data.TFRecordDataset(files).shuffle(10000, seed=7).repeat(3)
        dataset = collective.data.resumable(records, batch_size=4096).map(parse).prefetch(2)
        batch = tf.data.make_one_shot_iterator(dataset).get_next()

    Global batch k has the records k B to (k + 1) B - 1 of `dataset`, whatever N is, and each of N
    ranks has B / N of them. The position, the number of global batches that the runs of a session
    have taken, is a variable, '<name>/position', which a `tf.train.Saver` saves and restores with
    the others. A session that restores it, on any number of ranks, continues with the next batch:
    no batch is repeated or skipped. A batch counts when a run takes it from the iterator (only
    inside `strategy.scope()`), not when it is read ahead.

    `dataset` has all records, the same on every rank. Call `shuffle()` with a seed, `repeat()` and
    `filter()` before `resumable`; `map()`, `prefetch()`, `take()` and `zip()` may follow it. To
    resume at batch k, TensorFlow reads and drops k B records; datasets of `collective.data.parquet`
    and `collective.data.records` that are passed directly seek instead. Their epochs follow each
    other without a gap: a global batch may have records of two.

    An Estimator's input_fn may return it; the Estimator doesn't deal it again. For evaluation and
    prediction, and in a graph without a checkpoint, the data begin at their start. A warm start
    takes weights, not the position.

    Args:
        dataset: The records.
        batch_size: B, how many records a global batch has. If N doesn't divide it, the first ranks
            have one more record. The very last batch may have fewer than B; with fewer than N it
            isn't trained.
        name: Name of the variables; the same in every job that continues with the data.
        start: How many global batches to skip if no position is restored.
        drop_remainder: Whether to drop the last batch if it has fewer than B records.
        batch: Makes batches of records: called with a dataset and the number of records of a batch,
            it returns a dataset of batches. None: `dataset.batch(n)`. `parquet`, which makes
            batches itself, allows no other.
        on_change: What to do if the restored position is of other data: of another batch size, seed
            or files, or of a pipeline with other operations or constants. 'error' refuses to read
            them, 'restart' begins at `start`, 'continue' skips as many batches. With the latter two
            a checkpoint needn't have the position; it is then `start`.

    Raises:
        TypeError: it is no `tf.data.Dataset`.
        ValueError: `dataset` is already dealt, or differs between the ranks (see `strategy.shard`);
            an option is invalid; a rank would have no record of a batch; the graph already has a
            resumable dataset of this name.
        RuntimeError: it is made eagerly.
        tf.errors.InvalidArgumentError: while reading: the position is of other data.
        NotImplementedError: in a session: the batches pass through another operation after it, or
            an iterator gets several datasets.
    """
    graphs.refuse_eager("collective.data", "resumable() is called")
    collectives.init()
    rank, ranks = collectives.rank(), collectives.size()
    records: SeekableRecords | None = getattr(dataset, "collective_records", None)
    _check_options(batch_size, ranks, name, start, on_change, records, batch)
    if records is None:
        _check_records(dataset)
        source = DataSource(batch_size, None, None, dataset_analysis.digest(dataset))
    else:
        source = DataSource(batch_size, records.records, records.seed, records.digest)
    position = position_of(name, source, on_change, start)
    made_of = dataset_analysis.digest_of(repr(source).encode())
    dealt_input.note_source(_DEALER, made_of, batch_size)

    def batches(_: tf.Tensor) -> tf2.data.Dataset:
        first = tf.constant(start, tf.int64) if position is None else position.start()
        if records is not None:
            return records.batches(first, batch_size, drop_remainder, rank, ranks)
        left = dataset.skip(first * batch_size)
        return _batches_of_rank(left, batch_size, drop_remainder, batch, rank, ranks)

    # An Estimator knows by this name that the batches have been dealt.
    with tf.name_scope(dataset_analysis.RESUMABLE):
        return tf2.data.Dataset.range(1).flat_map(batches)


def _batches_of_rank(
    records: tf2.data.Dataset,
    batch_size: int,
    drop_remainder: bool,
    batch: Batch | None,
    rank: int,
    ranks: int,
) -> tf2.data.Dataset:
    """Returns a rank's parts of the global batches of `records`."""
    share = batch_size // ranks + (rank < batch_size % ranks)
    if ranks > 1 and batch_size % ranks == 0:
        records = records.shard(ranks, rank)
    elif ranks > 1:
        numbered = records.enumerate()
        own = numbered.filter(lambda number, _: tf.equal(number % batch_size % ranks, rank))
        records = own.map(lambda _, record: record)
    if batch is None:
        return records.batch(share, drop_remainder=drop_remainder)
    return batch(records, share)


def _check_options(
    batch_size: int,
    ranks: int,
    name: str,
    start: int,
    on_change: str,
    records: SeekableRecords | None,
    batch: Batch | None,
) -> None:
    if not (is_whole(batch_size) and batch_size >= ranks):
        raise ValueError(
            f"resumable(batch_size={batch_size!r}): a global batch needs at least one record for "
            f"each rank, and there {'is' if ranks == 1 else 'are'} {ranks}."
        )
    check_position_options("resumable", name, start, on_change)
    if records is not None and batch is not None:
        raise ValueError("resumable(batch=…): this dataset makes its batches itself; leave it out.")


def check_position_options(function: str, name: str, start: int, on_change: str) -> None:
    """Refuses options of a position that are invalid.

    Args:
        function: names the function that has them.
        name, start, on_change: see `resumable`.

    Raises:
        ValueError: one of them is.
    """
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ValueError(
            f"{function}(name={name!r}): it begins the names of variables, of letters, digits and "
            "_ . - /"
        )
    if not (is_whole(start) and start >= 0):
        raise ValueError(f"{function}(start={start!r}): it is a whole number of batches, from 0.")
    if on_change not in ON_CHANGE:
        raise ValueError(f"{function}(on_change={on_change!r}): it is one of {ON_CHANGE}.")


def _check_records(dataset: Any) -> None:
    """Refuses a dataset that isn't one of records, or differs between ranks."""
    if not isinstance(dataset, tf2.data.Dataset):
        raise TypeError(f"resumable() takes a tf.data.Dataset, not {type(dataset).__name__}.")
    if dataset_analysis.is_of_work_queue(dataset):
        raise ValueError(
            "resumable(): the dataset reads the items of a WorkQueue, so each rank has records of "
            "its own. Give it a dataset of all items instead: resumable() deals their records, and "
            "goes on in the middle of an item. (A WorkQueue goes on with the next item by itself.)"
        )
    if dataset_analysis.is_of_reader(dataset):
        raise ValueError(
            "resumable(): the dataset is made of batches of collective.data.parquet() or of "
            "another resumable(). Give it that of parquet() itself, without start, rank, ranks and "
            "drop_remainder, and put map() and others after it: "
            "resumable(parquet(files), batch_size=…).map(…)."
        )
    if dataset_analysis.is_sharded(dataset):
        raise ValueError(
            "resumable(): the dataset uses shard(), so each rank has a part of the records. Leave "
            "it out: resumable() takes all records, and deals them."
        )
    if dataset_analysis.shuffles_differently(dataset):
        raise ValueError(
            "resumable(): the dataset is shuffled without a seed, so each rank has an order of its "
            "own, and another one in each job. Give shuffle() a seed. (list_files() shuffles, too: "
            "it takes shuffle=False.)"
        )
    if dataset_analysis.are_seeds_drawn() and dataset_analysis.is_shuffled(dataset):
        raise ValueError(
            "resumable(): the dataset is shuffled, and an Estimator without a seed has its input "
            "shuffled in another order each time. Give the Estimator one, the same in every job: "
            "tf.estimator.RunConfig(tf_random_seed=…), or seed in a job file."
        )
    unordered = dataset_analysis.unordered(dataset)
    if unordered is not None:
        raise ValueError(
            f"resumable(): the dataset has an operation ({unordered}) with deterministic=False (or "
            "sloppy=True), so each rank has an order of its own, and "
            "another one in each job. Leave that out, or put it after resumable()."
        )
