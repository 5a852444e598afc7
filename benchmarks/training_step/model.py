"""Builds the model of step.py in plain TensorFlow, the same for every program that has one.

The symbols of shapes are training_step.workload's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from collective.train import LazyAdamOptimizer
from training_step.workload import BOTTOM, TOPS, Setting, shapes

LEARNING_RATE = 0.01
# Of every element of a table: all programs then have the same loss on step 1.
INITIAL_VALUE = 0.01
OPTIMIZERS = {
    "adagrad": tf.train.AdagradOptimizer,
    "ftrl": tf.train.FtrlOptimizer,
    "sgd": tf.train.GradientDescentOptimizer,
    "lazy_adam": LazyAdamOptimizer,  # TensorFlow alone has none
}
# The optimizers' own defaults.
SLOT_INITIAL_VALUES = {"accumulator": 0.1, "accum": 0.1, "linear": 0.0}


def session_config(setting: Setting) -> tf.ConfigProto:
    return tf.ConfigProto(
        intra_op_parallelism_threads=setting.intra_op,
        inter_op_parallelism_threads=setting.inter_op,
        allow_soft_placement=True,
    )


def optimizer(setting: Setting) -> tf.train.Optimizer:
    return OPTIMIZERS[setting.optimizer](LEARNING_RATE)


class Input:
    """Brings the batches into the graph.

    Attributes:
        tensors: by the names in `training_step.workload.shapes`.
    """

    def __init__(self, setting: Setting, batches: list[dict[str, np.ndarray]]):
        self._start = tf.no_op()
        self._starts_with: dict[Any, Any] = {}
        self._feeds: list[dict[Any, Any]] = [{}]
        if setting.input == "feed":
            self._make_placeholders(setting, batches)
        elif setting.input == "memory":
            self._keep_in_memory(setting, batches)
        else:
            self._make_dataset(setting, batches)

    def start(self, session: tf.Session) -> None:
        """Begins to read, before the first step."""
        session.run(self._start, self._starts_with)

    def feed(self, step: int) -> dict[Any, Any]:
        """Returns the feeds of a step for `Session.run`."""
        return self._feeds[step % len(self._feeds)]

    def _make_placeholders(self, setting: Setting, batches: list[dict[str, np.ndarray]]) -> None:
        self.tensors = {
            name: tf.placeholder(dtype, shape, name)
            for name, (dtype, shape) in shapes(setting).items()
        }
        self._feeds = [
            {tensor: batch[name] for name, tensor in self.tensors.items()} for batch in batches
        ]

    def _keep_in_memory(self, setting: Setting, batches: list[dict[str, np.ndarray]]) -> None:
        data = None
        for batch in batches:
            given = {
                name: tf.placeholder(dtype, batch[name].shape)
                for name, (dtype, _) in shapes(setting).items()
            }
            self._starts_with.update({given[name]: batch[name] for name in given})
            one = tf.data.Dataset.from_tensors(given)
            data = one if data is None else data.concatenate(one)
        assert data is not None
        iterator = tf.data.make_initializable_iterator(data.repeat().prefetch(2))
        self._start = iterator.initializer
        self.tensors = iterator.get_next()

    def _make_dataset(self, setting: Setting, batches: list[dict[str, np.ndarray]]) -> None:
        names = list(shapes(setting))
        dtypes = [dtype for dtype, _ in shapes(setting).values()]

        def arrays(i: int) -> list[np.ndarray]:
            return [batches[i][name] for name in names]

        data = tf.data.Dataset.range(len(batches)).repeat()
        data = data.map(lambda i: tf.numpy_function(arrays, [i], dtypes)).prefetch(2)
        options = tf.data.Options()
        options.threading.private_threadpool_size = 1
        iterator = tf.data.make_initializable_iterator(data.with_options(options))
        self._start = iterator.initializer
        self.tensors = dict(zip(names, iterator.get_next()))
        for name, (_, shape) in shapes(setting).items():
            self.tensors[name].set_shape(shape)


def embeddings(
    setting: Setting, batch: Mapping[str, tf.Tensor], table_scope: Any
) -> list[tf.Tensor]:
    """Looks up every feature: F × [B, D]."""
    tables = []
    with table_scope:
        for feature, rows in enumerate(setting.rows()):
            initializer = tf.constant_initializer(INITIAL_VALUE)
            shape = [None if setting.dynamic else rows, setting.dim]
            tables.append(
                tf.get_variable(
                    f"table_{feature}", shape, use_resource=True, initializer=initializer
                )
            )
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
    vectors = []
    for table, ids, indices in pieces:
        bags = tf.SparseTensor(indices, ids, [setting.samples, setting.ids[1]])
        sums = tf.nn.embedding_lookup_sparse(table, bags, None, combiner="sum")
        vectors.append(tf.ensure_shape(sums, [setting.samples, setting.dim]))
    return vectors


def loss(setting: Setting, batch: Mapping[str, tf.Tensor], table_scope: Any) -> tf.Tensor:
    """Returns the mean over a rank's samples of the cross entropy of a click.

    A loss that is linear in the embeddings would have a constant gradient, which TensorFlow
    computes once and for all.

    Args:
        setting: the sizes and the network.
        batch: `Input.tensors`.
        table_scope: within it the tables are made.
    """
    vectors = embeddings(setting, batch, table_scope)
    if setting.network == "squares":
        return tf.add_n([tf.nn.l2_loss(vector) for vector in vectors]) / setting.samples
    if setting.network == "none":
        joined = tf.concat(vectors, 1)
        generator = np.random.default_rng(7)
        weights = generator.uniform(-1.0, 1.0, [joined.shape[1], 1]).astype(np.float32)
        return _cross_entropy(tf.matmul(joined, tf.constant(weights)), batch["label"])
    bottom = _layers(batch["dense"], (*BOTTOM, setting.dim), "bottom", tf.nn.relu)
    stacked = tf.stack([bottom, *vectors], 1)
    products = tf.matmul(stacked, stacked, transpose_b=True)  # [B, F + 1, F + 1]
    count = setting.tables + 1
    below = [i * count + j for i in range(count) for j in range(i)]
    crossed = tf.gather(tf.reshape(products, [setting.samples, count * count]), below, axis=1)
    logits = _layers(tf.concat([bottom, crossed], 1), (*TOPS[setting.network], 1), "top", None)
    return _cross_entropy(logits, batch["label"])


def _cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))


def _layers(x: tf.Tensor, units: tuple[int, ...], name: str, last: Any) -> tf.Tensor:
    for i, width in enumerate(units):
        kernel = tf.get_variable(
            f"{name}_{i}/kernel",
            [x.shape[1], width],
            use_resource=True,
            initializer=tf.constant_initializer(first_kernel(i, int(x.shape[1]), width)),
        )
        bias = tf.get_variable(
            f"{name}_{i}/bias", [width], use_resource=True, initializer=tf.zeros_initializer()
        )
        x = tf.nn.bias_add(tf.matmul(x, kernel), bias)
        activation = last if i == len(units) - 1 else tf.nn.relu
        x = activation(x) if activation else x
    return x


def first_kernel(layer: int, inputs: int, units: int) -> np.ndarray:
    """Returns a layer's first weights by Glorot's rule: [inputs, units].

    They are drawn here, as TensorFlow draws other numbers from a seed in a graph than eagerly.
    """
    bound = np.sqrt(6 / (inputs + units))
    drawn = np.random.default_rng(layer).uniform(-bound, bound, [inputs, units])
    return drawn.astype(np.float32)


def initialize_whole(session: tf.Session, chosen: tf.train.Optimizer) -> None:
    """Gives every variable its initial value, tables and their slots one by one and by feeding it.

    TensorFlow's own initializers would leave constants of the tables' size in the session for as
    long as it lives.
    """
    values_of_large: dict[Any, float] = {}
    for variable in tf.trainable_variables():
        if not variable.op.name.startswith("table_"):
            continue
        values_of_large[variable.ref()] = INITIAL_VALUE
        for name in chosen.get_slot_names():
            slot = chosen.get_slot(variable, name)
            values_of_large[slot.ref()] = SLOT_INITIAL_VALUES[name]
    small = [v for v in tf.global_variables() if v.ref() not in values_of_large]
    session.run(tf.variables_initializer(small))
    for reference, value in values_of_large.items():
        variable = reference.deref()
        initial = np.full(variable.shape, value, np.float32)
        session.run(variable.initializer, {variable.initializer.inputs[1]: initial})
