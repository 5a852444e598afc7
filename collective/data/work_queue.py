"""Deals items of work to the ranks, and resumes where a checkpoint was saved."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.checkpoint.saving.gathered_state import GatheredState
from collective.data import dataset_analysis
from collective.ops.communication import collectives
from collective.ops.counting import counted
from collective.policy import is_whole
from collective.tensorflow_internals.checkpoints import saveable_object


class WorkQueue(GatheredState):
    """Deals items of work, such as file names, to the ranks: in each epoch every item to one rank.

        files = collective.data.WorkQueue(["a.csv", "b.csv", "c.csv", "d.csv"], num_epochs=2)
        dataset = tf.data.TextLineDataset(files.input_dataset()).batch(512)

    Item i of the queue goes to rank i mod N. DeepRec's goes to the rank that asks first; here ranks
    take steps together, none is faster, and a job is the same each time. Training ends when the
    first rank runs out of data: use items of equal size, and a number of items that N divides.

    If there are fewer items than ranks, every rank reads all items, and their records are dealt:
    record i to rank i mod N, where `TextLineDataset`, `TFRecordDataset` or `ParquetDataset` reads
    them, or `flat_map` or `interleave` of the items' dataset.

    The queue is part of checkpoints: a `tf.train.Saver` (of all that is to be saved, as that of
    `MonitoredTrainingSession`) saves the items that no rank has taken. A job that restores it, on
    any number of ranks, deals those. As in DeepRec, an item that was being read isn't read again.
    If the checkpoint has other items, or no queue, the queue starts again.

    Another session of the process, without a checkpoint, continues where the queue is.
    """

    def __init__(
        self,
        works: Sequence[str],
        num_epochs: int = 1,
        shuffle: bool = True,
        seed: int | None = None,
        prefix: str | None = None,
        num_slices: int | None = None,
        name: str = "work_queue",
    ):
        """Makes a queue, the same on all ranks.

        Args:
            works: the items.
            num_epochs: how often to deal all of them, from 1.
            shuffle: reorders them for each epoch, the same on all ranks.
            seed: of that order; None is 0.
            prefix: prepended to each item.
            num_slices: no effect; DeepRec slices database tables by it, not files.
            name: of its entries in checkpoints; a second queue of this name in a graph gets a
                number.

        Raises:
            ValueError: `works` is one string, or has no item; `num_epochs` is below 1.
        """
        del num_slices
        _check(works, num_epochs)
        collectives.init()
        self._rank, self._ranks = collectives.rank(), collectives.size()
        self._prefix = prefix or ""
        self._works = [str(work) for work in works]
        self._deals_records = len(self._works) < self._ranks
        self._all_items = list(_dealt(self._works, num_epochs, shuffle, seed or 0))
        self._lock = threading.Lock()
        # How many items each rank has taken, where that is about to be saved.
        self._gathered: list[int] | None = None
        self._begin(self._all_items)
        digest = hashlib.sha256("\0".join(self._works).encode()).hexdigest()
        if tf.executing_eagerly():
            return  # An eager program has no Saver.
        with tf.name_scope(name) as scope, tf.device("/cpu:0"):
            self._digest = tf.constant(digest, name="digest")
            works_left = tf.numpy_function(self._take_remaining, [], tf.string, name="works")
            works_left.set_shape([None])
        specs = [
            saveable_object.SaveSpec(self._digest, "", f"{scope}digest"),
            saveable_object.SaveSpec(works_left, "", f"{scope}works"),
        ]
        # The name is that of an operation, by which an exported graph can be imported.
        super().__init__(self._digest, specs, self._digest.op.name)
        tf.add_to_collection(tf.GraphKeys.SAVEABLE_OBJECTS, self)

    @property
    def works(self) -> list[str]:
        """Returns the items of an epoch, in the order in which they were given."""
        return list(self._works)

    def __len__(self) -> int:
        """Returns how many items an epoch has."""
        return len(self._works)

    def input_dataset(self) -> tf2.data.Dataset:
        """Returns a dataset of this rank's items, which takes items as they are needed."""
        # An Estimator and strategy.shard() know by this name that the items have been dealt.
        scope = "" if self._deals_records else dataset_analysis.OF_WORK_QUEUE
        with tf.name_scope(scope or "work_queue_items"):
            dataset = tf2.data.Dataset.from_generator(
                self._taken_items, output_signature=tf2.TensorSpec([], tf.string)
            )
        # TensorFlow would take an item ahead; a checkpoint would count it as used.
        options = tf2.data.Options()
        options.experimental_optimization.inject_prefetch = False
        dataset = dataset.with_options(options)
        if self._deals_records:
            _deal_records(dataset, self._ranks, self._rank)
        else:
            dataset.collective_is_dealt = True
        # So that the columns of a file can be read.
        dataset.collective_files = [self._prefix + item for item in self._all_items]
        return dataset

    def take(self) -> tf.Tensor:
        """Returns a tensor that is this rank's next item in each run.

        Raises:
            ValueError: there are fewer items than ranks: a rank would have none.
        """
        if self._deals_records:
            raise ValueError(
                f"WorkQueue has {counted(len(self._works), 'item')} for "
                f"{counted(self._ranks, 'rank')}: a rank without one would end training at once. "
                "Split the data into at least as many files as ranks, or read them by a dataset "
                "of input_dataset(), of which records are dealt."
            )
        return tf.data.make_one_shot_iterator(self.input_dataset()).get_next()

    def input_producer(self) -> Any:
        """Returns a queue of this rank's items, for readers; a queue runner fills it."""
        with tf.name_scope("work_queue_producer"):
            queue = tf.FIFOQueue(1, [tf.string], [[]])
            runner = tf.train.QueueRunner(queue, [queue.enqueue(self.take())])
            tf.add_to_collection(tf.GraphKeys.QUEUE_RUNNERS, runner)
        return queue

    def add_summary(self) -> None:
        """Adds a summary of the part of the items that are still to be dealt."""
        with tf.name_scope("work_queue_summary"), tf.device("/cpu:0"):
            part = tf.numpy_function(self._remaining_part, [], tf.float32, name="part")
            part.set_shape([])
            tf.summary.scalar(f"fraction_of_{len(self._all_items)}_full", part)

    # -- in checkpoints

    def contribution(self) -> Any:
        """Returns how many of its items this rank has taken."""
        with self._lock:
            return self._taken

    def gather(self, contributions: list[Any]) -> None:
        """Takes the ranks' numbers of items taken, which determine the remaining items."""
        self._gathered = [int(taken) for taken in contributions]

    def restore(self, restored_tensors: Sequence[tf.Tensor], restored_shapes: Any) -> Any:
        """Returns the operation that continues with the items of a checkpoint.

        Args:
            restored_tensors: the digest of its queue's items, and the items that remained.
            restored_shapes: None.
        """
        del restored_shapes
        return tf.numpy_function(
            self._go_on, [self._digest, *restored_tensors], tf.bool, name="restore_works"
        )

    def restart(self) -> None:
        """Starts again: the checkpoint has no such queue."""
        self._begin(self._all_items)

    def _begin(self, items: Sequence[str]) -> None:
        with self._lock:
            self._items, self._taken, self._gathered = list(items), 0, None

    def _go_on(self, digest: bytes, of_checkpoint: bytes, works: np.ndarray) -> bool:
        is_same = digest == of_checkpoint
        if not is_same and self._rank == 0:
            print(
                f"WorkQueue '{self.name}': the checkpoint's queue has other items; this one begins "
                "from the start.",
                file=sys.stderr,
            )
        self._begin([work.decode() for work in works] if is_same else self._all_items)
        return is_same

    def _take_remaining(self) -> np.ndarray:
        """Returns the items that no rank has taken."""
        with self._lock:
            taken, self._gathered = self._gathered or [self._taken] * self._ranks, None
            if self._deals_records:  # Every rank takes all items.
                taken = [max(taken)]
            ranks = len(taken)
            left = [item for i, item in enumerate(self._items) if i // ranks >= taken[i % ranks]]
        return np.array([item.encode() for item in left], object)

    def _remaining_part(self) -> np.float32:
        """Returns approximately how much is left, as this rank sees it."""
        with self._lock:
            share = 1 if self._deals_records else self._ranks
            left = max(len(self._items) - self._taken * share, 0)
        return np.float32(left / len(self._all_items))

    def _taken_items(self) -> Iterator[str]:
        while True:
            with self._lock:
                number = self._taken
                if not self._deals_records:
                    number = number * self._ranks + self._rank
                if number >= len(self._items):
                    return
                self._taken += 1
                item = self._items[number]
            yield self._prefix + item


def _deal_records(items: Any, ranks: int, rank: int) -> None:
    """Makes a dataset of items deal the records that are read from them.

    Args:
        items: the dataset. TensorFlow's datasets of files call its flat_map.
        ranks, rank: how many ranks there are, and which this is.
    """

    def dealing(original: Any) -> Any:
        @functools.wraps(original)
        def deal(*args: Any, **kwargs: Any) -> Any:
            with tf.name_scope(dataset_analysis.OF_WORK_QUEUE):
                records = original(*args, **kwargs).shard(ranks, rank)
            records.collective_is_dealt = True
            return records

        return deal

    def passing_on(original: Any) -> Any:
        @functools.wraps(original)
        def passed_on(*args: Any, **kwargs: Any) -> Any:
            others = original(*args, **kwargs)
            _deal_records(others, ranks, rank)
            return others

        return passed_on

    for name in ("flat_map", "interleave"):
        setattr(items, name, dealing(getattr(items, name)))
    for name in ("shuffle", "repeat", "prefetch", "map", "filter"):
        setattr(items, name, passing_on(getattr(items, name)))


def _check(works: Any, num_epochs: Any) -> None:
    if isinstance(works, (str, bytes, os.PathLike)):
        path = os.fsdecode(works)
        raise ValueError(
            f"WorkQueue({path!r}) is given one item, not a list of items: write "
            f"WorkQueue([{path!r}]), or list what a pattern names: "
            f"WorkQueue(sorted(tf.io.gfile.glob({path!r})))."
        )
    if not len(works):
        raise ValueError("WorkQueue has no items: give it the files that are to be read.")
    if not (is_whole(num_epochs) and num_epochs >= 1):
        raise ValueError(
            f"WorkQueue(num_epochs={num_epochs!r}): items are dealt a whole number of "
            "times, from 1."
        )


def _dealt(works: Sequence[str], epochs: int, shuffle: bool, seed: int) -> Iterator[str]:
    """Yields the items of all epochs, in the order in which they are dealt."""
    generator = random.Random(seed)
    for _ in range(epochs):
        epoch = list(works)
        if shuffle:
            generator.shuffle(epoch)
        yield from epoch
