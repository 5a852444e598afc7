"""Checks where TensorFlow would have a step on a machine with a GPU, and what it would copy."""

from __future__ import annotations

import collections

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


def trained() -> tf.Operation:
    """Returns a step of training."""
    strategy = CollectiveStrategy()
    with strategy.scope(plan="quiet"):
        with strategy.embedding_scope():
            looked_up = results()
        loss = tf.add_n([tf.reduce_sum(tf.square(rows)) for rows in looked_up])
        step: tf.Operation = tf.train.AdagradOptimizer(0.1).minimize(loss)
    return step


@pytest.mark.parametrize("backend", ["hb", "sok"])
def test_the_host_checks_what_it_has(backend: str, monkeypatch: pytest.MonkeyPatch):
    """What it gives is in its memory until it is asked for, by the one operation that takes it to
    the GPU.
    """
    monkeypatch.setenv("COLLECTIVE_STRATEGY", backend)
    with tf.Graph().as_default():
        devices = placing.placed([trained()])
        copies = list(placing.copies(devices))
    types = collections.Counter(op.type for op in devices)
    assert types["CollectiveAsk"] == types["CollectiveBounds"] == types["CollectiveMismatches"] == 1
    assert not {"Min", "Max"} & set(types)
    assert not [str(copy) for copy in copies if copy.up]
    # What comes back are an optimizer's numbers.
    assert {copy.tensor.dtype for copy in copies if not copy.up} <= {tf.float32}
