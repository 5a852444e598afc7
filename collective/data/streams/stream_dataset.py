"""Makes a dataset of the batches that loaders serve; its position is in checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.data import dataset_analysis, dealt_input
from collective.data.batches import batch_dataset
from collective.data.batches.batch import Batch
from collective.data.batches.packed_batch import PackedBatch, pack
from collective.data.positions import DataSource, OnChange, position_of
from collective.data.resumable_dataset import check_position_options
from collective.data.streams.loader import DEFAULT_NAME
from collective.data.streams.stream_reader import StreamReader
from collective.job import streams
from collective.ops.communication import collectives
from collective.ops.graph import graphs
from collective.policy import is_whole

_DEALER = dealt_input.Dealer(
    "collective.data.stream(): the addresses of its loaders, or an option,",
    "samples of a batch",
    "Give all ranks the same loaders, in the same order, and the same options.",
)


def stream(
    loaders: Sequence[str] | None = None,
    *,
    name: str = DEFAULT_NAME,
    batch_size: int | None = None,
    like: Batch | None = None,
    timeout: float = 60.0,
    prefetch: int = 2,
    start: int = 0,
    on_change: OnChange = "error",
) -> tf2.data.Dataset:
    """Makes a dataset of this rank's part of the batches that loaders make in other processes.

        batch = tf.data.make_one_shot_iterator(collective.data.stream()).get_next()
        rows = tf.nn.embedding_lookup_sparse(table, batch['ids']['user'].to_sparse(), None)

    Each loader, a program that calls `collective.data.serve_stream`, has a stream of numbered
    batches; the streams take turns, until each has ended. Global batch k is thus the same for any
    N, and each of N ranks takes B / N of its B samples, which follow each other: the steps equal
    those of one process. Elements are like `Batch.arrays()`, of tensors.

    **Exactly once.** The position, the number of global batches that the runs of a session have
    taken, is a variable, '<name>/position', in checkpoints, as that of
    `collective.data.resumable`. A session that restores it, on any number of ranks, continues with
    the next batch: none is repeated or skipped with respect to the weights. Only `map()`,
    `prefetch()`, `take()` and `zip()` may follow. An Estimator's input_fn and a Trainer's function
    may return it. For evaluation and prediction the streams begin at their start.

    A loader that dies may come back at its address; ranks wait for it. They take batches, and
    nobody sends them: what is on its way is `prefetch` batches a rank, and what loaders have made
    ahead.

    Args:
        loaders: their addresses, HOST:PORT, in the order of their streams. Default: those of
            COLLECTIVE_LOADERS, as `collective launch --data-loaders` sets it.
        name: which batches of the loaders (those of a single function are 'data'); the name of the
            variables, too, so it stays the same from job to job.
        batch_size: B, how many samples a global batch has. A Trainer needs it. A batch of another
            size is then an error, except for a smaller one at a stream's end.
        like: a batch with the names, types and shapes of all. Default: a loader is asked for one
            sample when the dataset is made.
        timeout: seconds for which a loader may be out of reach before this is an error. A loader
            that answers but has no batch yet gets ten times as long.
        prefetch: how many batches a rank asks for at a time; a loader's `window` is larger.
        start: how many global batches to skip if no position is restored.
        on_change: what to do with a position of another number of loaders or another `batch_size`;
            see `collective.data.resumable`.

    Raises:
        ImportError: pyarrow isn't installed.
        TypeError: `like` is no Batch.
        ValueError: an option is invalid, there are no loaders, or the graph already has a position
            of this name.
        RuntimeError: it is made eagerly.
        collective.data.StreamError: a loader can't give the sample; the message has its address.
        tf.errors.UnknownError: while reading: a loader is out of reach for too long, has another
            secret, or can't make a batch; a batch has fewer samples than there are ranks. The
            message has the loader's address.
        tf.errors.InvalidArgumentError: while reading: a batch has other names, types or shapes; the
            position is of other data.
        NotImplementedError: in a session: as for `collective.data.resumable`.
    """
    graphs.refuse_eager("collective.data", "stream() is called")
    collectives.init()
    addresses = _addresses(loaders)
    _check_options(name, batch_size, like, timeout, prefetch, start, on_change)
    reader = StreamReader(
        addresses,
        name,
        streams.stream_key(os.environ),
        collectives.rank(),
        collectives.size(),
        timeout,
        prefetch,
        batch_size,
    )
    model = reader.example() if like is None else like
    source = DataSource(batch_size, None, None, len(addresses))
    position = position_of(name, source, on_change, start)
    described = repr((addresses, name, source))
    dealt_input.note_source(_DEALER, dataset_analysis.digest_of(described.encode()), 1)

    layout = pack(model).layout

    def read(first: int) -> Iterator[PackedBatch]:
        return reader.packed(int(first))

    @tf.autograph.experimental.do_not_convert
    def batches(_: tf.Tensor) -> tf2.data.Dataset:
        first = tf.constant(start, tf.int64) if position is None else position.start()
        return batch_dataset.generated(read, model, (first,), layout)

    # An Estimator knows by this name that the batches have been dealt.
    with tf.name_scope(dataset_analysis.RESUMABLE):
        return tf2.data.Dataset.range(1).flat_map(batches)


def _addresses(loaders: Sequence[str] | None) -> list[str]:
    if loaders is None:
        listed = os.environ.get(streams.LOADERS)
        if not listed:
            raise ValueError(
                f"stream(): there is no {streams.LOADERS} in the environment. Start the job by "
                "`collective launch --data-loaders 1 loader.py train.py`, or give the addresses of "
                "loaders: stream(['h1:7000'])."
            )
        return streams.loader_addresses(listed)
    if isinstance(loaders, str):
        raise ValueError(f"stream(loaders={loaders!r}): it is a list of addresses.")
    return streams.loader_addresses(loaders)


def _check_options(
    name: str,
    batch_size: int | None,
    like: Batch | None,
    timeout: float,
    prefetch: int,
    start: int,
    on_change: OnChange,
) -> None:
    check_position_options("stream", name, start, on_change)
    if not (batch_size is None or (is_whole(batch_size) and batch_size >= collectives.size())):
        raise ValueError(
            f"stream(batch_size={batch_size!r}): a global batch has at least one sample for each "
            f"of the ranks, of which there {'is' if collectives.size() == 1 else 'are'} "
            f"{collectives.size()}."
        )
    if not (like is None or isinstance(like, Batch)):
        raise TypeError(f"stream(like=…) is a collective.data.Batch, not {type(like).__name__}.")
    if not (isinstance(timeout, (int, float)) and 0 < timeout < float("inf")):
        raise ValueError(f"stream(timeout={timeout!r}): it is a number of seconds above 0.")
    if not (is_whole(prefetch) and prefetch >= 1):
        raise ValueError(f"stream(prefetch={prefetch!r}): it is a whole number from 1.")
