"""Checks where TensorFlow would have a step on a machine with a GPU, and what it would copy."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy
from collective.ops import kernel_device
from collective.ops.graph.graph_analysis import upstream
from tests.gpu_double.copies import copies
from tests.kernels.conftest import bind
from tests.kernels.gpu.emulator.bridge import EmulatedBridge


class PlacedBridge(EmulatedBridge):
    """Has operations where a GPU's bridge has them: only graphs can be built."""

    placed, kind, label = "/gpu:0", "GPU", ""


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    bind(PlacedBridge(), monkeypatch)
    monkeypatch.setattr(kernel_device, "chosen", lambda: "gpu")


BATCH = {
    "plain": tf.TensorSpec([None], tf.int64),
    "narrow": tf.TensorSpec([None], tf.int32),
    "square": tf.TensorSpec([None, None], tf.int64),
    "summed": tf.TensorSpec([None], tf.int64),
    "weighted": tf.TensorSpec([None], tf.int32),
    "at": tf.TensorSpec([None, 2], tf.int64),
    "weights": tf.TensorSpec([None], tf.float32),
}


class Batch:
    """Holds what the host gives."""

    def __init__(self) -> None:
        data = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=BATCH)
        self._given = tf.data.make_one_shot_iterator(data).get_next()

    def __getitem__(self, name: str) -> tf.Tensor:
        return self._given[name]

    def by_sample(self, name: str) -> tf.SparseTensor:
        return tf.SparseTensor(self["at"], self[name], tf.constant([9, 9], tf.int64))


def results() -> list[tf.Tensor]:
    """Looks up by ids of any kind, samples and weights."""
    batch, tables = Batch(), [tf.get_variable(f"t{t}", [50, 4]) for t in range(5)]
    by_sample = batch.by_sample
    return [
        *(
            tf.nn.embedding_lookup(table, batch[name])
            for table, name in zip(tables, ("plain", "narrow", "square"))
        ),
        tf.nn.embedding_lookup_sparse(tables[3], by_sample("summed"), None, combiner="sum"),
        tf.nn.embedding_lookup_sparse(
            tables[4], by_sample("weighted"), by_sample("weights"), combiner="mean"
        ),
    ]


def prepared() -> list[tf.Tensor]:
    """Looks up ids that a graph prepares, as scripts and feature columns do, also by the rows of
    another lookup.
    """
    batch = Batch()
    first, second, third = (tf.get_variable(f"t{t}", [50, 4]) for t in range(3))
    bucket = tf.math.floormod(batch["plain"], 50)
    rows = tf.nn.embedding_lookup(first, tf.where(bucket > 7, bucket, bucket // 2))
    return [
        rows,
        tf.nn.safe_embedding_lookup_sparse(second, batch.by_sample("summed"), combiner="mean"),
        tf.nn.embedding_lookup(third, tf.argmax(rows, 1)),
    ]


def dynamic() -> list[tf.Tensor]:
    """Looks a dynamic table up."""
    batch, table = Batch(), tf.get_variable("t", [None, 4])
    return [
        tf.nn.embedding_lookup(table, batch["plain"]),
        tf.nn.safe_embedding_lookup_sparse(table, batch.by_sample("summed"), combiner="mean"),
    ]


def step(
    looked_up: Callable[[], list[tf.Tensor]], optimizer: Any = tf.train.AdagradOptimizer
) -> set[tf.Operation]:
    """Returns all operations of a step of training."""
    strategy = CollectiveStrategy()
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            rows = looked_up()
        loss = tf.add_n([tf.reduce_sum(tf.square(of_one)) for of_one in rows])
        return upstream([optimizer(0.1).minimize(loss)])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["hb", "sok"])
def test_the_host_checks_what_it_has(backend: str, monkeypatch: pytest.MonkeyPatch):
    """What it gives is in its memory until it is asked for, by the one operation that takes it to
    the GPU. Nothing else of a step is copied.
    """
    monkeypatch.setenv("COLLECTIVE_STRATEGY", backend)
    operations = step(results)
    types = collections.Counter(op.type for op in operations)
    assert types["CollectiveAsk"] == types["CollectiveBounds"] == types["CollectiveMismatches"] == 1
    assert not {"Min", "Max"} & set(types)
    assert not [str(copy) for copy in copies(operations)]


@pytest.mark.slow
def test_the_host_prepares_what_it_has():
    assert {(copy.up, copy.tensor.op.type) for copy in copies(step(prepared))} == {
        (False, "ArgMax"),  # keys that come of rows
        (True, "SparseFillEmptyRows"),  # which samples are empty, for their zeros
        (True, "Const"),  # the shape of these zeros: TensorFlow goes to and fro by itself
        (False, "Cast"),
    }


def test_a_dynamic_table_copies_nothing():
    assert not [str(copy) for copy in copies(step(dynamic))]


def test_adam_copies_its_numbers():
    """Once, for all tables: the rate, which it computes of its variables."""
    found = copies(step(results, tf.train.AdamOptimizer))
    assert [(copy.up, copy.tensor.op.name) for copy in found if not copy.up] == [
        (False, "Adam/update_t0/truediv")
    ]
    assert {copy.tensor.op.name for copy in found if copy.up} == {"Adam/beta1", "Adam/beta2"}
