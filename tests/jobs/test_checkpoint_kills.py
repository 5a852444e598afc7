"""kill -9 at moments of a save: the checkpoint before, or the new one, is restored, whole; the next
save leaves no litter.
"""

import os
import random

import pytest

from tests.jobs import pool

SEED = int(os.environ.get("COLLECTIVE_TEST_SEED") or 1)

SCRIPT = '''
import os, signal, sys
import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.checkpoint import checkpoint_management
from collective import CollectiveStrategy
from collective import checkpoint
from collective.checkpoint import background, commit, snapshot, table_io, tensor_bundle

tf.logging.set_verbosity(tf.logging.ERROR)
folder, victims, moment = sys.argv[1], [int(r) for r in sys.argv[2].split(',') if r], int(sys.argv[3])
beside = sys.argv[4] == 'beside'
strategy = CollectiveStrategy()
rank, ranks = strategy.rank(), strategy.world_size()
armed, count = False, 0
tensor_bundle.SLICE_BYTES, tensor_bundle.FILE_BYTES = 400, 1200           # several slices and files for each rank


def dying_in(owner, name):
    """Each call counts as two moments, before and after it; at the last one this process is gone."""
    function = getattr(owner, name)

    def call(*args, **kwargs):
        for there in (False, True):
            global count
            count += armed
            if armed and rank in victims and count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            if not there:
                out = function(*args, **kwargs)
        return out
    setattr(owner, name, call)


for owner, name in ((commit, 'move'), (commit, 'sync'), (commit, '_delete'), (commit, 'is_staged'), (tf.io.gfile, 'mkdir'),
                    (tf.io.gfile, 'rmtree'), (tensor_bundle, 'merge'),
                    (tensor_bundle.BundleWriter, '_flush'), (table_io, 'write'), (snapshot.PartSnapshot, 'write'),
                    (background.BackgroundSave, '_leave_note'), (background.BackgroundSave, '_finish')):
    dying_in(owner, name)


def expected(steps):
    """Every step adds 1 to each row that is looked up: row i in steps i, i + 1, i + 2 (mod 50), on every rank."""
    rows = np.zeros([50, 2], np.float32)
    for step in range(steps):
        rows[[step % 50, (step + 1) % 50, (step + 2) % 50]] += 1
    return rows


def train_twice():
    for _ in range(2):
        at = session.run(step)
        session.run(train, {ids: [at % 50, (at + 1) % 50, (at + 2) % 50]})


with strategy.scope(checkpoint_blocking=not beside), tf.Graph().as_default():
    with strategy.embedding_scope():
        t = tf.get_variable('t', [50, 2], initializer=tf.zeros_initializer())
    ids = tf.placeholder(tf.int64, [None])
    loss = -tf.reduce_sum(tf.nn.embedding_lookup(t, ids))
    step = tf.train.get_or_create_global_step()
    train = tf.train.MomentumOptimizer(1.0, 0.0).minimize(loss, global_step=step)
    rows = tf.nn.embedding_lookup(t, tf.range(50))
    saver = tf.train.Saver(max_to_keep=2)
    with tf.Session() as session:
        state = tf.train.get_checkpoint_state(folder)
        if state:
            saver.restore(session, state.model_checkpoint_path)
            saver.recover_last_checkpoints(state.all_model_checkpoint_paths)
        else:
            session.run(tf.global_variables_initializer())
        done, got = session.run([step, rows])
        np.testing.assert_array_equal(got, expected(done))
        assert state is None or state.model_checkpoint_path.endswith(f'-{done}')
        print('restored', done, flush=True)
        saver.save(session, f'{folder}/m', global_step=step)            # as CheckpointSaverHook does at its start
        checkpoint.wait()
        if rank == 0:
            state = tf.train.get_checkpoint_state(folder)
            used = {'checkpoint', 'm.owner'}
            for path in state.all_model_checkpoint_paths:
                opened = tensor_bundle.Bundle(path)
                opened.check_files()
                used |= {os.path.basename(p) for p in [*opened.data_paths(), path + '.index', path + '.meta']}
            assert set(os.listdir(folder)) == used, set(os.listdir(folder)) ^ used
        for _ in range(2):
            train_twice()
            saver.save(session, f'{folder}/m', global_step=step)
            if beside:
                train_twice()
                checkpoint.wait()
            armed = True
        print('moments', count, flush=True)
'''


def job(tmp_path, ranks, victims="", moment=0, how="blocking"):
    """Restores the latest checkpoint and checks it, looks for litter, saves twice more; killed in
    the last save, if at all.
    """
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "saved").mkdir(exist_ok=True)
    options = ("-np", ranks, "--device", "cpu")
    script, folder = tmp_path / "script.py", tmp_path / "saved"
    done = pool.launch(*options, script, folder, victims, moment, how, timeout=180)
    return done.returncode, done.stdout


def survive(tmp_path, draw, times, how="blocking"):
    """A chain of jobs, each killed in its last save, the next one restoring what is there."""
    code, out = job(tmp_path, 2, how=how)
    assert code == 0
    most = max(int(line.split("moments")[1]) for line in out.splitlines() if "moments" in line)
    assert most > 40
    for _ in range(times):
        victims, moment = draw.choice(["0", "1", "0,1"]), draw.randrange(1, most)
        print("killed:", victims, "at", moment)
        code, out = job(tmp_path, 2, victims, moment, how)
        assert "restored" in out
        # rank 1 has fewer moments than rank 0
        assert code == 137 or victims == "1" and code == 0, out
    code, out = job(tmp_path, draw.choice([1, 2, 3]), how=how)
    assert code == 0 and "moments" in out


@pytest.mark.timeout(900)
def test_three_moments(tmp_path):
    print(f"COLLECTIVE_TEST_SEED={SEED}")
    survive(tmp_path, random.Random(SEED), 3)


@pytest.mark.timeout(900)
def test_three_moments_beside_training(tmp_path):
    survive(tmp_path, random.Random(SEED + 100), 3, "beside")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", ["blocking", "beside"])
@pytest.mark.parametrize("seed", range(4))
def test_many_moments(tmp_path, seed, how):
    survive(tmp_path, random.Random(seed), 6, how)
