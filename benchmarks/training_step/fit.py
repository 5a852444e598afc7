"""Times the model of step.py under Keras's `fit`, with this library or in plain Keras.

The programs `keras` and `plain_keras` of step.py: `plain_keras` does one rank's part of the work
with whole tables, like `plain`. A step is the time from the end of one batch to that of the next,
as a callback sees it; the first batches, in which functions are traced, are among the warm-up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow.compat.v2 as tf

from collective import CollectiveStrategy  # before tf.keras is used, which is Keras 2 then
from training_step import model as step_model
from training_step.workload import BOTTOM, TOPS, Setting, read

OPTIMIZERS = {"adagrad": "Adagrad", "ftrl": "Ftrl", "sgd": "SGD"}


class Clicks(tf.keras.Model):
    """Is the network of `training_step.model.loss`; it is made in embedding_scope()."""

    def __init__(self, setting: Setting):
        super().__init__()
        self.setting = setting
        start = tf.keras.initializers.Constant(step_model.INITIAL_VALUE)
        self.tables = [
            tf.keras.layers.Embedding(rows, setting.dim, start, name=f"table_{feature}")
            for feature, rows in enumerate(setting.rows())
        ]
        for table in self.tables:
            table.build([None])
        generator = np.random.default_rng(7)
        inputs = setting.tables * setting.dim
        self.weighted = generator.uniform(-1.0, 1.0, [inputs, 1]).astype(np.float32)
        if setting.network in TOPS:
            self.bottom = _layers((*BOTTOM, setting.dim), "relu")
            self.top = _layers((*TOPS[setting.network], 1), None)

    def call(self, batch: Any, training: Any = None) -> Any:
        ids = tf.unstack(batch["ids"], self.setting.tables)
        vectors = [table(own) for table, own in zip(self.tables, ids)]
        if self.setting.network == "none":
            return tf.matmul(tf.concat(vectors, 1), self.weighted)
        bottom = self.bottom(batch["dense"])
        stacked = tf.stack([bottom, *vectors], 1)
        products = tf.matmul(stacked, stacked, transpose_b=True)  # [B, F + 1, F + 1]
        count = self.setting.tables + 1
        below = [i * count + j for i in range(count) for j in range(i)]
        crossed = tf.gather(tf.reshape(products, [-1, count * count]), below, axis=1)
        return self.top(tf.concat([bottom, crossed], 1))


def _layers(units: tuple[int, ...], last: str | None) -> Any:
    def start_of(layer: int) -> Callable[..., Any]:
        return lambda shape, dtype=None, **_: tf.constant(step_model.first_kernel(layer, *shape))

    activations = ["relu"] * (len(units) - 1) + [last]
    return tf.keras.Sequential(
        [
            tf.keras.layers.Dense(size, activation, kernel_initializer=start_of(layer))
            for layer, (size, activation) in enumerate(zip(units, activations))
        ]
    )


class _Clock(tf.keras.callbacks.Callback):
    """Takes the times between batches; a plain copy trains until no other one is timed any more."""

    def __init__(
        self,
        setting: Setting,
        plain: bool,
        together: Callable[[str], None],
        busy: Callable[[], bool],
    ):
        super().__init__()
        self._setting, self._plain, self._together, self._busy = setting, plain, together, busy
        self.times: list[float] = []
        self.losses: list[float] = []
        self.cpu_ms = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # The log is the mean of the losses so far.
        sums = logs["loss"] * (batch + 1)
        done, last = batch + 1, self._setting.warmup + self._setting.steps
        if done <= last:
            self.losses.append(float(sums - sum(self.losses)))
        if done > self._setting.warmup and done <= last:
            self.times.append((time.perf_counter() - self._start) * 1e3)
        if done == last:
            self.cpu_ms = (time.process_time() - self._cpu) * 1e3 / self._setting.steps
        if self._plain and done >= last and not self._busy():
            self.model.stop_training = True
        if done == self._setting.warmup:
            self._together("start")
            self._cpu = time.process_time()
        self._start = time.perf_counter()


def measure(
    setting: Setting,
    folder: Path,
    rank: int,
    plain: bool,
    together: Callable[[str], None],
    busy: Callable[[], bool],
) -> dict[str, Any]:
    """Trains by `fit` and times its steps; the result is as of `step_program.measure`.

    Args:
        setting: what to measure.
        folder: of the data.
        rank: this process's.
        plain: whether it is plain Keras.
        together, busy: as of `step_program.measure`.
    """
    tf.config.threading.set_intra_op_parallelism_threads(setting.intra_op)
    tf.config.threading.set_inter_op_parallelism_threads(setting.inter_op)
    batches = read(setting, folder, rank)
    stacked = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
    labels = stacked.pop("label")
    scope, embedding_scope = contextlib.nullcontext(), contextlib.nullcontext()
    if not plain:
        strategy = CollectiveStrategy()
        scope, embedding_scope = strategy.scope(), strategy.embedding_scope()
    clock = _Clock(setting, plain, together, busy)
    # A plain copy goes on until the others have been timed.
    steps = setting.warmup + setting.steps + (100_000 if plain else 0)
    with scope:
        dataset = tf.data.Dataset.from_tensor_slices((stacked, labels)).repeat().prefetch(2)
        with embedding_scope:
            model = Clicks(setting)
        optimizer = getattr(tf.keras.optimizers, OPTIMIZERS[setting.optimizer])
        model.compile(optimizer(step_model.LEARNING_RATE), tf.keras.losses.BinaryCrossentropy(True))
        model.fit(dataset.take(steps), verbose=0, callbacks=[clock])
    return {
        "times": clock.times,
        "losses": clock.losses,
        "cpu_ms": clock.cpu_ms,
        "collectives": {},
        "bytes": 0,
    }
