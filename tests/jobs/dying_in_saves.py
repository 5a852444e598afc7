"""Saves a checkpoint while it trains, one during training, and two increments; on the way a signal
strikes ranks, if asked. It begins with what is there, and checks it.

    dying_in_saves.py FOLDER VICTIMS KIND MOMENT SIGNAL

VICTIMS are ranks ('0,1'; none: ''), KIND the save that is struck (one of KINDS), MOMENT how many
moments it goes on before. Every function of a save that changes files has two, before and after it.
"""

import os
import signal
import sys

import numpy as np
import tensorflow.compat.v1 as tf

import collective
from collective import CollectiveStrategy, checkpoint
from collective.checkpoint.files import bundle_writer as bundle_file
from collective.checkpoint.files import chain, commit, tensor_bundle
from collective.checkpoint.rows import increment_io, table_io
from collective.checkpoint.saving import background, snapshot

KINDS = ("blocking", "background", "increment")
STEPS = [
    *((commit, name) for name in ("move", "sync", "_delete", "is_staged", "_remove_increments")),
    *((tf.io.gfile, name) for name in ("mkdir", "rmtree")),
    *((tensor_bundle, "merge"), (tensor_bundle.BundleWriter, "_flush")),
    *((bundle_file.BundleFile, "add"), (table_io, "write"), (increment_io, "write")),
    *((background.BackgroundSave, name) for name in ("_leave_note", "_finish")),
    (snapshot.PartSnapshot, "write"),
]
ROWS = 50
LIVE = 5  # keys of the dynamic table: those of the last so many steps


class Moments:
    """Counts the moments of the saves that are armed; at the one that was asked for it strikes."""

    def __init__(self, kind, moment, number):
        self.armed, self.counts = "", dict.fromkeys(KINDS, 0)
        self._kind, self._moment, self._signal = kind, moment, number

    def pass_one(self):
        if not self.armed:
            return
        self.counts[self.armed] += 1
        if self.armed == self._kind and self.counts[self.armed] == self._moment:
            os.kill(os.getpid(), self._signal)

    def count(self, owner, name):
        function = getattr(owner, name)

        def call(*args, **kwargs):
            self.pass_one()
            out = function(*args, **kwargs)
            self.pass_one()
            return out

        setattr(owner, name, call)


def expected(steps):
    """Every step adds 1 to rows i, i + 1, i + 2 (mod 50), on every rank."""
    rows = np.zeros([ROWS, 2], np.float32)
    for step in range(steps):
        rows[[step % ROWS, (step + 1) % ROWS, (step + 2) % ROWS]] += 1
    return rows


def check_no_litter(folder):
    state = tf.train.get_checkpoint_state(folder)
    used = {"checkpoint", "m.owner"}
    for path in state.all_model_checkpoint_paths:
        opened = chain.open_links(path, len(chain.increments_of(path)))
        for bundle in (opened.base, *opened.increments):
            bundle.check_files()
            used |= {os.path.basename(p) for p in [*bundle.data_paths(), bundle.prefix + ".index"]}
        used.add(os.path.basename(path) + ".meta")
    assert set(os.listdir(folder)) == used, set(os.listdir(folder)) ^ used


def main():
    folder, victims, kind, moment, name = sys.argv[1:]
    tf.logging.set_verbosity(tf.logging.ERROR)
    strategy = CollectiveStrategy()
    rank = strategy.rank()
    is_victim = str(rank) in victims.split(",")
    # Several slices and files for each rank.
    tensor_bundle.SLICE_BYTES, tensor_bundle.FILE_BYTES = 400, 1200
    moments = Moments(kind if is_victim else "", int(moment), getattr(signal, f"SIG{name}"))
    for owner, function in STEPS:
        moments.count(owner, function)
    with strategy.scope(checkpoint_blocking=False), tf.Graph().as_default():
        with strategy.embedding_scope():
            t = tf.get_variable("t", [ROWS, 2], initializer=tf.zeros_initializer())
        d = collective.get_embedding_variable("d", 2, initializer=tf.zeros_initializer())
        ids, keys = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.int64, [None])
        loss = -tf.reduce_sum(tf.nn.embedding_lookup(t, ids))
        loss -= tf.reduce_sum(tf.nn.embedding_lookup(d, keys))
        step = tf.train.get_or_create_global_step()
        train = tf.train.MomentumOptimizer(1.0, 0.0).minimize(loss, global_step=step)
        rows = tf.nn.embedding_lookup(t, tf.range(ROWS))
        saver = tf.train.Saver(max_to_keep=2)
        checkpoint.enable_increments(folder)
        with tf.Session() as session:

            def train_twice():
                for _ in range(2):
                    at = session.run(step)
                    now = [at % ROWS, (at + 1) % ROWS, (at + 2) % ROWS]
                    session.run(train, {ids: now, keys: [at]})
                    d.remove(session, [at - LIVE])

            def save_blocking():
                with strategy.scope(checkpoint_blocking=True):
                    saver.save(session, f"{folder}/m", global_step=step)

            def save_in_background():
                saver.save(session, f"{folder}/m", global_step=step)
                train_twice()
                checkpoint.wait()

            def save_increments():
                checkpoint.save_increment(session, folder)
                train_twice()
                checkpoint.save_increment(session, folder)

            state = tf.train.get_checkpoint_state(folder)
            if state:
                saver.restore(session, state.model_checkpoint_path)
                saver.recover_last_checkpoints(state.all_model_checkpoint_paths)
            else:
                session.run(tf.global_variables_initializer())
            done, got = session.run([step, rows])
            np.testing.assert_array_equal(got, expected(done))
            own = [key for of_block, _ in d.export(session) for key in of_block.tolist()]
            assert set(own) <= set(range(max(0, done - LIVE), done)), (done, own)
            assert d.total_count().eval(session=session) == min(LIVE, done)
            print("restored", done, flush=True)
            save_blocking()  # as CheckpointSaverHook does at its start
            if rank == 0:
                check_no_litter(folder)
            saves = dict(zip(KINDS, (save_blocking, save_in_background, save_increments)))
            for is_armed in (False, True):
                for of_kind, save in saves.items():
                    train_twice()
                    moments.armed = of_kind if is_armed else ""
                    save()
                    moments.armed = ""
            print("moments", moments.counts, flush=True)


if __name__ == "__main__":
    main()
