"""Deals datasets to ranks: every batch of an input_fn, or every element, goes to one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import warnings
from collections.abc import Iterator
from typing import Any, Callable

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective.coordination import barrier
from collective.coordination.dealt_input import GraphInput
from collective.data import dataset_analysis
from collective.data.dealt_input import Dealer, followed
from collective.estimator import python_random
from collective.estimator.python_random import States
from collective.ops.communication import collectives
from collective.ops.graph import graph_state
from collective.tensorflow_internals.graphs import function_utils

_OF_INPUT_FN = Dealer(
    "the dataset of input_fn",
    "batches",
    "Or give input_fn an argument input_context, by which it takes its own share.",
)
_OF_SHARD = Dealer(
    "strategy.shard(): the dataset",
    "elements",
    "Or shard first, then shuffle: strategy.shard(dataset).shuffle(…).",
)


@dataclasses.dataclass(frozen=True)
class DealtInput:
    """Says how to use the batches of an input_fn before they are dealt.

    Attributes:
        input_fn: the user's.
        batches: how many of the first batches to use; None: all.
        passes: how many times to use them.
    """

    input_fn: Callable[..., Any]
    batches: int | None = None
    passes: int = 1


def takes_context(input_fn: Callable[..., Any]) -> bool:
    """Tells whether `input_fn` deals its input itself, by its argument `input_context`."""
    return "input_context" in function_utils.fn_args(input_fn)


def input_context() -> tf2.distribute.InputContext:
    """Returns the context of this rank: pipeline r of N."""
    ranks = collectives.size()
    return tf2.distribute.InputContext(
        num_input_pipelines=ranks,
        input_pipeline_id=collectives.rank(),
        num_replicas_in_sync=ranks,
    )


@contextlib.contextmanager
def same_shuffling() -> Iterator[None]:
    """Lets datasets made inside shuffle alike on all ranks without a seed, and differently each
    time.

    Only inside: a graph without a seed stays without one for everything else, such as dropout,
    which may differ between ranks.
    """
    graph = tf.get_default_graph()
    if graph.seed is not None:
        with same_draws():
            yield
        return
    with same_draws() as seed:
        if seed is not None:
            tf.set_random_seed(seed)
        try:
            with dataset_analysis.drawn_seeds():
                yield
        finally:
            graph.seed = None


@contextlib.contextmanager
def same_draws() -> Iterator[int | None]:
    """Makes Python's and NumPy's own generators give every rank rank 0's numbers inside the
    context.

    Yields:
        A seed that rank 0 draws each time; None with one rank.
    """
    if collectives.size() == 1:
        yield None
        return
    drawn = {"seed": random.SystemRandom().randrange(2**31), "states": States.now().text()}
    of_rank_0 = barrier.exchange(None, "the random numbers of an input", drawn)[0]
    with python_random.of_rank_0(of_rank_0["states"]):
        yield of_rank_0["seed"]


def deal(dataset: Any, batches: int | None = None, passes: int = 1) -> tf2.data.Dataset:
    """Returns this rank's batches of `dataset`: number r, r + N, r + 2N, ….

    Args:
        dataset: the result of an input_fn; the same on every rank, with batches as elements.
        batches: how many of `dataset` to use, with several ranks; None: all.
        passes: how many times to use them, with several ranks.

    Raises:
        ValueError: with several ranks, `dataset` isn't a dataset, or has a different order on each.
    """
    ranks = collectives.size()
    if ranks == 1:
        return dataset
    if not isinstance(dataset, tf2.data.Dataset):
        raise ValueError(
            f"input_fn returned {type(dataset).__name__}, which cannot be dealt to {ranks} ranks. "
            "Return a tf.data.Dataset of batches (tf.data.Dataset.from_tensor_slices takes what "
            "numpy_input_fn and pandas_input_fn take); or give input_fn an argument input_context "
            "(tf.distribute.InputContext), by which it takes its own share. (With "
            "shard_input=False for strategy.estimator each rank uses all that its input_fn gives: "
            f"an evaluation then counts every record {ranks} times.)"
        )
    if dataset_analysis.is_resumable(dataset):
        # Its batches are global ones, as many as one rank has: there is nothing to repeat.
        graph_state.of(tf.get_default_graph(), GraphInput).has_global_batches = True
        return dataset if batches is None else dataset.take(batches)
    if dataset_analysis.is_dealt_by_reader(dataset):
        return _dealt_again(dataset, batches, passes)
    unordered = dataset_analysis.unordered(dataset)
    if unordered is not None:
        raise ValueError(
            f"the dataset of input_fn has an operation ({unordered}) with deterministic=False (or "
            "sloppy=True), so each rank has an order of its own; if its "
            f"batches were dealt to {ranks} ranks, some records would be used twice and others "
            "never. Leave that out. Or give input_fn an argument input_context "
            "(tf.distribute.InputContext), by which it takes its own share first."
        )
    if dataset_analysis.is_sharded(dataset):
        warnings.warn(
            "the dataset of input_fn already uses shard(), and its batches are now dealt to "
            f"{ranks} ranks again. If it takes its own share, pass shard_input=False to "
            "strategy.estimator, or give input_fn an argument input_context.",
            stacklevel=2,
        )
    options = tf2.data.Options()
    options.deterministic = True  # batch k must be the same on every rank
    dataset = dataset.with_options(options)
    if batches is not None:
        dataset = dataset.take(batches)
    if passes > 1:
        dataset = dataset.repeat(passes)
    graph_state.of(tf.get_default_graph(), GraphInput).has_global_batches = True
    dataset = followed(dataset, _OF_INPUT_FN, by_record=True)
    return dataset.shard(ranks, collectives.rank())


def shard(dataset: Any) -> tf2.data.Dataset:
    """Returns this rank's elements of `dataset` (see `CollectiveStrategy.shard`)."""
    if not isinstance(dataset, tf2.data.Dataset):
        raise TypeError(
            f"strategy.shard() takes a tf.data.Dataset, not {type(dataset).__name__}. "
            "tf.data.Dataset.from_tensor_slices makes one of arrays and tensors."
        )
    ranks = collectives.size()
    if ranks == 1 or dataset_analysis.is_resumable(dataset):
        return dataset
    if dataset_analysis.is_dealt_by_reader(dataset):
        return dataset
    if dataset_analysis.shuffles_differently(dataset):
        raise ValueError(
            "strategy.shard(): the dataset is shuffled without a seed, so each rank has an order "
            "of its own, and some records would be used twice and others never. Shard it first: "
            "strategy.shard(dataset).shuffle(…). Or give shuffle() a seed, and "
            "sample_from_datasets() one. (list_files() shuffles, too: it takes "
            "shuffle=False.) Where a part of a zip() is shuffled, shard the parts first, then zip "
            "them."
        )
    unordered = dataset_analysis.unordered(dataset)
    if unordered is not None:
        raise ValueError(
            f"strategy.shard(): the dataset has an operation ({unordered}) with "
            "deterministic=False (or sloppy=True), so each rank has an order of its own, and some "
            "records would be used twice and others never. Shard it first: "
            "strategy.shard(dataset).map(…). Or leave that out."
        )
    if dataset_analysis.is_sharded(dataset):
        warnings.warn(
            "strategy.shard(): the dataset already uses shard(), and each rank now gets a part of "
            f"that part: 1 of {ranks} of its elements. Shard it once.",
            stacklevel=3,
        )
    options = tf2.data.Options()
    options.deterministic = True  # element i must be the same on every rank
    dataset = followed(dataset.with_options(options), _OF_SHARD, by_record=False)
    return dataset.shard(ranks, collectives.rank())


def _dealt_again(dataset: Any, batches: int | None, passes: int) -> tf2.data.Dataset:
    """Returns as much of an already dealt dataset as `deal` would return."""
    if batches is not None:
        dataset = dataset.take(len(range(collectives.rank(), batches, collectives.size())))
    graph_state.of(tf.get_default_graph(), GraphInput).has_global_batches = True
    return dataset.repeat(passes) if passes > 1 else dataset
