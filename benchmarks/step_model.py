"""The model of step.py: plain TensorFlow, the same for every program that has one. Shapes' symbols
are step_workload's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from step_workload import BOTTOM, TOP, Setting, shapes

LEARNING_RATE = 0.01
# of every table's elements: all programs then have the same loss on step 1
FIRST = 0.01
OPTIMIZERS = {
    "adagrad": tf.train.AdagradOptimizer,
    "ftrl": tf.train.FtrlOptimizer,
    "sgd": tf.train.GradientDescentOptimizer,
}
SLOT_STARTS = {"accumulator": 0.1, "accum": 0.1, "linear": 0.0}  # the optimizers' own defaults


def session_config(setting: Setting) -> tf.ConfigProto:
    return tf.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=setting.inter_op
    )


def optimizer(setting: Setting) -> tf.train.Optimizer:
    return OPTIMIZERS[setting.optimizer](LEARNING_RATE)


class Input:
    """The batches on their way into the graph.

    Attributes:
        tensors: by the names in `step_workload.shapes`.
        start: what must run before the first step.
    """

    def __init__(self, setting: Setting, arrays: list[dict[str, np.ndarray]]):
        self._arrays, kinds = arrays, shapes(setting)
        self.start = tf.no_op()
        if setting.input == "feed":
            self.tensors = {
                name: tf.placeholder(dtype, shape, name) for name, (dtype, shape) in kinds.items()
            }
            self._feeds: list[dict[Any, Any]] = [
                {self.tensors[name]: batch[name] for name in kinds} for batch in arrays
            ]
            return
        self._feeds, dtypes = [{}], [dtype for dtype, _ in kinds.values()]
        data = (
            tf.data.Dataset.range(len(arrays))
            .repeat()
            .map(
                lambda i: tf.numpy_function(
                    lambda i: [arrays[i][name] for name in kinds], [i], dtypes
                )
            )
        )
        options = tf.data.Options()
        options.threading.private_threadpool_size = 1
        iterator = tf.data.make_initializable_iterator(data.prefetch(2).with_options(options))
        self.start, self.tensors = iterator.initializer, dict(zip(kinds, iterator.get_next()))
        for name, (_, shape) in kinds.items():
            self.tensors[name].set_shape(shape)

    def feed(self, step: int) -> dict[Any, Any]:
        """For `Session.run`."""
        return self._feeds[step % len(self._feeds)]


def embeddings(
    setting: Setting, batch: Mapping[str, tf.Tensor], table_scope: Any
) -> list[tf.Tensor]:
    """F × [B, D]."""
    with table_scope:
        tables = [
            tf.get_variable(
                f"table_{f}",
                [rows, setting.dim],
                use_resource=True,
                initializer=tf.constant_initializer(FIRST),
            )
            for f, rows in enumerate(setting.rows())
        ]
    if not setting.pooled:
        return [
            tf.nn.embedding_lookup(table, ids)
            for table, ids in zip(tables, tf.unstack(batch["ids"]))
        ]
    pieces = zip(
        tables,
        tf.split(batch["ids"], batch["sizes"], num=setting.tables),
        tf.split(batch["indices"], batch["sizes"], num=setting.tables),
    )
    shape = [setting.samples, setting.ids[1]]
    pooled = [
        tf.nn.embedding_lookup_sparse(
            table, tf.SparseTensor(indices, ids, shape), None, combiner="sum"
        )
        for table, ids, indices in pieces
    ]
    return [tf.ensure_shape(x, [setting.samples, setting.dim]) for x in pooled]


def loss(setting: Setting, batch: Mapping[str, tf.Tensor], table_scope: Any) -> tf.Tensor:
    """The mean over a rank's samples of the cross entropy of a click.

    A loss that is linear in the embeddings would have a constant gradient, which TensorFlow
    computes once and for all.

    Args:
        setting: what to build.
        batch: `Input.tensors`.
        table_scope: within it the tables are made.
    """
    vectors = embeddings(setting, batch, table_scope)
    if setting.network == "none":
        joined = tf.concat(vectors, 1)
        weights = (
            np.random.default_rng(7).uniform(-1.0, 1.0, [joined.shape[1], 1]).astype(np.float32)
        )
        return _cross_entropy(tf.matmul(joined, tf.constant(weights)), batch["label"])
    bottom = _layers(batch["dense"], (*BOTTOM, setting.dim), "bottom", tf.nn.relu)
    stacked = tf.stack([bottom, *vectors], 1)
    # [B, F + 1, F + 1]
    products = tf.matmul(stacked, stacked, transpose_b=True)
    count = setting.tables + 1
    below = [i * count + j for i in range(count) for j in range(i)]
    crossed = tf.gather(tf.reshape(products, [setting.samples, count * count]), below, axis=1)
    logits = _layers(tf.concat([bottom, crossed], 1), (*TOP, 1), "top", None)
    return _cross_entropy(logits, batch["label"])


def _cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))


def _layers(x: tf.Tensor, units: tuple[int, ...], name: str, last: Any) -> tf.Tensor:
    for i, width in enumerate(units):
        kernel = tf.get_variable(
            f"{name}_{i}/kernel",
            [x.shape[1], width],
            use_resource=True,
            initializer=tf.glorot_uniform_initializer(seed=i),
        )
        bias = tf.get_variable(
            f"{name}_{i}/bias", [width], use_resource=True, initializer=tf.zeros_initializer()
        )
        x = tf.nn.bias_add(tf.matmul(x, kernel), bias)
        activation = last if i == len(units) - 1 else tf.nn.relu
        x = activation(x) if activation else x
    return x


def initialize_whole(session: tf.Session, chosen: tf.train.Optimizer) -> None:
    """Gives every variable its first value, tables one after the other and by feeding it.

    TensorFlow's own initializers would leave constants of the tables' size in the session for as
    long as it lives.
    """
    large = {v: FIRST for v in tf.trainable_variables() if v.op.name.startswith("table_")}
    for table in list(large):
        large.update(
            {chosen.get_slot(table, slot): SLOT_STARTS[slot] for slot in chosen.get_slot_names()}
        )
    large = {v.ref(): first for v, first in large.items()}
    session.run(
        tf.variables_initializer([v for v in tf.global_variables() if v.ref() not in large])
    )
    for reference, first in large.items():
        variable = reference.deref()
        session.run(
            variable.initializer,
            {variable.initializer.inputs[1]: np.full(variable.shape, first, np.float32)},
        )
