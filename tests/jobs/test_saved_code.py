"""A job's code is next to its checkpoints, and builds the model outside of training."""

import contextlib

import numpy as np
import tensorflow.compat.v1 as tf

from collective import checkpoint
from tests.jobs import pool

PROGRAM = """
import shutil
import sys
import tensorflow.compat.v1 as tf
from collective import CollectiveStrategy
import sizes

def build(strategy):
    with strategy.embedding_scope():
        return tf.get_variable("t", [sizes.ROWS, 2])

if __name__ == "__main__":
    strategy = CollectiveStrategy()
    with strategy.scope(save_code=True, check=5), tf.Graph().as_default():
        build(strategy)
        tf.train.get_or_create_global_step()
        for turn in range(2):
            with tf.train.MonitoredTrainingSession(checkpoint_dir=sys.argv[1]):
                if turn == 0 and strategy.rank() == 0:
                    shutil.rmtree(sys.argv[1] + "/code")
"""


def test_a_job_saves_its_code_with_its_first_checkpoint(tmp_path):
    (tmp_path / "job").mkdir()
    script = tmp_path / "job" / "train.py"
    script.write_text(PROGRAM)
    (tmp_path / "job" / "sizes.py").write_text("ROWS = 5\n")
    done = pool.launch("-np", "2", script, tmp_path / "ckpt")
    assert done.returncode == 0
    (tmp_path / "job" / "sizes.py").write_text("ROWS = 6\n")
    code = checkpoint.load_code(str(tmp_path / "ckpt"))
    assert set(code.manifest["files"]) == {"train.py", "sizes.py"}
    assert code.manifest["scope"]["check"] == 5 and code.manifest["ranks"] == 2

    class Outside:
        embedding_scope = contextlib.nullcontext

    with tf.Graph().as_default():
        assert code.module("train").build(Outside()).shape.as_list() == [5, 2]
    table = checkpoint.load(str(tmp_path / "ckpt"))["t"]
    assert table.shape == (5, 2) and np.isfinite(table[:]).all()
