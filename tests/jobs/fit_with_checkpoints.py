"""Trains a Keras model by `fit`, with checkpoints: FOLDER [DIES_AT], and prints its weights' sums.

It trains 2 epochs of 5 steps; a rank 0 that dies at a step ends the job.
"""

import os
import sys

import numpy as np
import tensorflow as tf

import collective
from collective.tensorflow_internals.keras import package as keras

folder, dies_at = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else -1
strategy = collective.CollectiveStrategy()
BATCH, EPOCH = 12, 5
random = np.random.default_rng(0)
ids = random.integers(0, 11, BATCH * EPOCH)
labels = random.normal(0, 1, len(ids)).astype(np.float32)
start = random.normal(0, 1, (11, 4)).astype(np.float32)


class Dies(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations.numpy()) == dies_at and strategy.rank() == 0:
            os._exit(3)


with strategy.scope():
    size, rank = strategy.world_size(), strategy.rank()
    # In another order in each epoch.
    batches = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(BATCH).shuffle(EPOCH, seed=4)
    step = BATCH // size
    own = batches.map(
        lambda x, y: (x[rank * step : (rank + 1) * step], y[rank * step : (rank + 1) * step])
    )
    given = keras.Input([], dtype=tf.int64)
    with strategy.embedding_scope():
        initializer = keras.initializers.Constant(start)
        rows = keras.layers.Embedding(11, 4, initializer, name="ids")(given)
    top = keras.layers.Dense(1, kernel_initializer="ones", name="top")
    model = keras.Model(given, top(rows))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    callbacks = [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)]
    if folder != "plain":
        saved = collective.keras.callbacks.Checkpoint(folder, save_freq=3, continue_id="one")
        callbacks += [saved, Dies()]
    model.fit(own, epochs=2, verbose=0, callbacks=callbacks)
    table = tf.function(lambda: model.layers[1](tf.range(11)))()
    print("steps", int(model.optimizer.iterations.numpy()))
    print("values", *(f"{x:.6f}" for x in [*table.numpy().sum(0), *top.kernel.numpy()[:, 0]]))
