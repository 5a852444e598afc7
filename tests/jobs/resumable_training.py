"""Trains to a global step, from wherever its checkpoint is, on input that the step alone decides:
for tests of restarts and of preemption.

    resumable_training.py FOLDER STEPS [increments:STEPS] [RANK:STEP:EVENT ...]

An event happens on a rank as it comes to a step, once in the job's folder: "kill", "exit:3",
"raise", "term" or "int" (a signal to this rank alone), "stop" (SIGSTOP), or "always:…", which
happens in each attempt. With "increments:3" it saves one every three steps.
"""

import hashlib
import os
import signal
import sys
import time

import numpy as np
import tensorflow.compat.v1 as tf

from collective import CollectiveStrategy

tf.logging.set_verbosity(tf.logging.ERROR)
SAVE_EVERY, V = 4, 40


def batch(step, rank, size):
    """Returns the rank's ids and targets of a step: a part of the step's batch of 24."""
    draw = np.random.default_rng(step)
    ids, y = draw.integers(0, V, (24, 3)), draw.normal(size=(24, 1)).astype(np.float32)
    return ids[rank::size], y[rank::size]


def happen(event, folder, rank, step):
    """Carries out an event, unless it has happened before."""
    when, _, what = event.partition(":always:")
    name = what or event.split(":", 2)[2]
    at = (when if what else event).split(":")
    if (rank, step) != (int(at[0]), int(at[1])):
        return
    mark = os.path.join(folder, event.replace(":", "_") + ".happened")
    if not what:
        if os.path.exists(mark):
            return
        open(mark, "w").close()
    if name.startswith("exit:"):
        os._exit(int(name[5:]))
    if name == "raise":
        raise ValueError("boom")
    signals = {"kill": "SIGKILL", "term": "SIGTERM", "int": "SIGINT", "stop": "SIGSTOP"}
    os.kill(os.getpid(), getattr(signal, signals[name]))


def main(folder, steps, events):
    every_steps = [int(event[11:]) for event in events if event.startswith("increments:")]
    events = [event for event in events if not event.startswith("increments:")]
    strategy = CollectiveStrategy()
    rank, size = strategy.rank(), strategy.world_size()
    with open(os.path.join(folder, f"pid.{rank}"), "w") as file:
        file.write(str(os.getpid()))
    print(f"attempt {os.environ.get('COLLECTIVE_RESTART_COUNT')} of {size} ranks", flush=True)
    with strategy.scope(plan="quiet", deterministic=True), tf.Graph().as_default():
        tf.set_random_seed(5)
        with strategy.embedding_scope():
            tables = tf.get_variable("static", [V, 4]), tf.get_variable("dynamic", [None, 4])
        ids, y = tf.placeholder(tf.int64, [None, 3]), tf.placeholder(tf.float32, [None, 1])
        rows = [tf.reshape(tf.nn.embedding_lookup(table, ids), [-1, 12]) for table in tables]
        hidden = tf.layers.dense(tf.concat(rows, 1), 8, tf.nn.relu)
        loss = tf.reduce_mean(tf.square(tf.layers.dense(hidden, 1) - y))
        step = tf.train.get_or_create_global_step()
        train = tf.train.AdagradOptimizer(0.1).minimize(loss, global_step=step)
        every = tf.range(V, dtype=tf.int64)
        state = [tf.nn.embedding_lookup(table, every) for table in tables]
        state += [v for v in tf.trainable_variables() if v.op.name.startswith("dense")]
        hooks = [tf.train.StopAtStepHook(last_step=steps)] if steps else []
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=os.path.join(folder, "saved"),
            save_checkpoint_steps=3 * SAVE_EVERY if every_steps else SAVE_EVERY,
            save_incremental_checkpoint_steps=every_steps[0] if every_steps else None,
            save_summaries_steps=None,
            hooks=hooks,
        ) as session:
            at = session.run_step_fn(lambda step_context: int(step_context.session.run(step)))
            print(f"began at {at}", flush=True)
            weights = None
            while not session.should_stop():
                for event in events:
                    happen(event, folder, rank, at)
                x, target = batch(at, rank, size)
                _, at = session.run([train, step], {ids: x, y: target}), at + 1
                if at == steps:
                    weights = session.run_step_fn(
                        lambda step_context: step_context.session.run(state)
                    )
                if not steps:
                    with open(os.path.join(folder, f"step.{rank}"), "w") as file:
                        file.write(str(at))
                    time.sleep(0.01)
        if weights is not None:
            digest = hashlib.blake2b(b"".join(x.tobytes() for x in weights), digest_size=8)
            print(f"weights {digest.hexdigest()} at {at}", flush=True)
    print("went on", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
