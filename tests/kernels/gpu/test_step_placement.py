"""Checks where TensorFlow would have a step on a machine with a GPU, and what it would copy."""

from __future__ import annotations

import collections
from collections.abc import Callable

import pytest
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy
from collective.ops import placement
from tests.gpu_double import placing
from tests.kernels.conftest import bind
from tests.kernels.gpu.emulator.bridge import EmulatedBridge


class PlacedBridge(EmulatedBridge):
    """Has operations where a GPU's bridge has them: only graphs can be built."""

    placed, kind, label = "/gpu:0", "GPU", ""


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    bind(PlacedBridge(), monkeypatch)
    monkeypatch.setattr(placement, "chosen", lambda: "gpu")


BATCH = {
    "plain": tf.TensorSpec([None], tf.int64),
    "narrow": tf.TensorSpec([None], tf.int32),
    "square": tf.TensorSpec([None, None], tf.int64),
    "summed": tf.TensorSpec([None], tf.int64),
    "weighted": tf.TensorSpec([None], tf.int32),
    "at": tf.TensorSpec([None, 2], tf.int64),
    "weights": tf.TensorSpec([None], tf.float32),
}


def results() -> list[tf.Tensor]:
    """Looks up by ids of any kind, samples and weights that the host gives."""
    data = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=BATCH)
    batch = tf.data.make_one_shot_iterator(data).get_next()
    tables = [tf.get_variable(f"t{t}", [50, 4]) for t in range(5)]

    def by_sample(name: str) -> tf.SparseTensor:
        return tf.SparseTensor(batch["at"], batch[name], tf.constant([9, 9], tf.int64))

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
    data = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=BATCH)
    batch = tf.data.make_one_shot_iterator(data).get_next()
    first, second, third = (tf.get_variable(f"t{t}", [50, 4]) for t in range(3))
    by_sample = tf.SparseTensor(batch["at"], batch["summed"], tf.constant([9, 9], tf.int64))
    bucket = tf.math.floormod(batch["plain"], 50)
    rows = tf.nn.embedding_lookup(first, tf.where(bucket > 7, bucket, bucket // 2))
    return [
        rows,
        tf.nn.safe_embedding_lookup_sparse(second, by_sample, combiner="mean"),
        tf.nn.embedding_lookup(third, tf.argmax(rows, 1)),
    ]


def placed_step(looked_up: Callable[[], list[tf.Tensor]]) -> dict[tf.Operation, str]:
    """Returns the devices of all operations of a step of training; each has a kernel there."""
    strategy = CollectiveStrategy()
    with strategy.scope(plan="quiet"), tf.Graph().as_default():
        with strategy.embedding_scope():
            rows = looked_up()
        loss = tf.add_n([tf.reduce_sum(tf.square(of_one)) for of_one in rows])
        devices = placing.placed([tf.train.AdagradOptimizer(0.1).minimize(loss)])
    on_gpu = [op for op, device in devices.items() if device == placing.GPU]
    assert not [op.name for op in on_gpu if placing.gpu_kernel(op) is None]
    ours = {op.type for op in on_gpu if op.type.startswith("Collective")}
    assert {"CollectiveAsk", "CollectivePool", "CollectiveSparseReduceUpdate"} <= ours
    return devices


@pytest.mark.parametrize("backend", ["hb", "sok"])
def test_the_host_checks_what_it_has(backend: str, monkeypatch: pytest.MonkeyPatch):
    """What it gives is in its memory until it is asked for, by the one operation that takes it to
    the GPU. Nothing else of a step is copied.
    """
    monkeypatch.setenv("COLLECTIVE_STRATEGY", backend)
    devices = placed_step(results)
    types = collections.Counter(op.type for op in devices)
    assert types["CollectiveAsk"] == types["CollectiveBounds"] == types["CollectiveMismatches"] == 1
    assert not {"Min", "Max"} & set(types)
    assert not [str(copy) for copy in placing.copies(devices)]


def test_the_host_prepares_what_it_has():
    copies = placing.copies(placed_step(prepared))
    assert {(copy.up, copy.tensor.op.type) for copy in copies} == {
        (False, "ArgMax"),  # keys that come of rows
        (True, "SparseFillEmptyRows"),  # which samples are empty, for their zeros
        (True, "Const"),  # the shape of these zeros: TensorFlow goes to and fro by itself
        (False, "Cast"),
    }
