"""Trains a Keras model by fit, from wherever its checkpoint is: for tests of preemption.

    resumable_fit.py FOLDER EPOCHS [unknown] [eager] [unsaved] [often] [plain]
        [RANK:NAME:COUNT[:kill|:raise]]

EPOCHS 0 is no end. The data are the same in each job; with "unknown" nobody knows their length. As
rank RANK has noted NAME for the COUNTth time ("step", "validated", "between"), it is told to stop,
killed, or raises, once in a folder. With "often" it saves every fourth step. With "plain" it trains
the model that one process would have, in plain Keras.
"""

import contextlib
import hashlib
import os
import signal
import sys
import time

import numpy as np
import tensorflow as tf

import collective
from collective import CollectiveStrategy

tf.get_logger().setLevel("ERROR")
keras = tf.keras
BATCH, STEPS, V = 24, 9, 40


class Note(keras.callbacks.Callback):
    """Writes what has happened, and how often, to a file for each kind."""

    def __init__(self, folder, rank, tell):
        super().__init__()
        self.folder, self.rank, self.tell, self.counts = folder, rank, tell, {}

    def note(self, name):
        self.counts[name] = self.counts.get(name, 0) + 1
        with open(os.path.join(self.folder, f"{name}.{self.rank}"), "w") as file:
            file.write(str(self.counts[name]))
        mark = os.path.join(self.folder, f"told.{self.rank}")
        moment, how = ":".join(self.tell.split(":")[:3]), self.tell.split(":")[3:]
        if moment == f"{self.rank}:{name}:{self.counts[name]}" and not os.path.exists(mark):
            open(mark, "w").close()
            if how == ["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
            if how == ["raise"]:
                raise ValueError("a fault in a callback")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)

    def on_train_batch_begin(self, batch, logs=None):
        self.note("between")

    def on_train_batch_end(self, batch, logs=None):
        self.note("step")

    def on_test_batch_end(self, batch, logs=None):
        self.note("validated")


def make_model(scope):
    with scope():
        ids = keras.Input([3], dtype=tf.int64)
        rows = keras.layers.Embedding(V, 4, keras.initializers.Constant(0.1), name="t")(ids)
    hidden = keras.layers.Flatten()(rows)
    for units in (8, 1):
        start = keras.initializers.GlorotUniform(seed=units)
        hidden = keras.layers.Dense(units, kernel_initializer=start, name=f"dense{units}")(hidden)
    return keras.Model(ids, hidden)


def data(batch, rank=0, size=1, records=BATCH * STEPS):
    draw = np.random.default_rng(2)
    arrays = draw.integers(0, V, (records, 3)), draw.normal(size=(records, 1))
    return tf.data.Dataset.from_tensor_slices(arrays).shard(size, rank).batch(batch)


def main(folder, epochs, *options):
    strategy = CollectiveStrategy()
    rank, size = strategy.rank(), strategy.world_size()
    with open(os.path.join(folder, f"pid.{rank}"), "w") as file:
        file.write(str(os.getpid()))
    plain = "plain" in options
    with contextlib.nullcontext() if plain else strategy.scope(plan="quiet"):
        model = make_model(contextlib.nullcontext if plain else strategy.embedding_scope)
        model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly="eager" in options)
        if plain:
            model.fit(data(BATCH), epochs=epochs, verbose=0)
        else:
            own = data(BATCH // size, rank, size)
            if "unknown" in options:
                own = own.filter(lambda *_: True)
            tell = next((each for each in options if ":" in each), "")
            # Other ranks answer rank 0 in the end.
            held_out = data(BATCH, rank, size, records=BATCH * 4 if rank else BATCH * 40)
            callbacks = [Note(folder, rank, tell)]
            if "unsaved" not in options:
                callbacks.append(
                    collective.keras.callbacks.Checkpoint(
                        os.path.join(folder, "saved"),
                        save_freq=4 if "often" in options else 1000,
                        continue_id="one",
                    )
                )
            model.fit(own, epochs=epochs, verbose=0, validation_data=held_out, callbacks=callbacks)
        weights = b"".join(x.tobytes() for x in model.get_weights())
        values = np.concatenate([x.ravel() for x in model.get_weights()])
        np.save(os.path.join(folder, f"weights{size}.{rank}.npy"), values)
        digest = hashlib.blake2b(weights, digest_size=8).hexdigest()
        steps = int(model.optimizer.iterations)
        print(f"weights {digest} at {steps}", flush=True)
    print("went on", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) or 10**6, *sys.argv[3:])
