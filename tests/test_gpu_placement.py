"""Where tables would be on a GPU: TensorFlow knows its kernels for GPUs also on a machine without
one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(
    not tf.test.is_built_with_cuda(),
    reason="this TensorFlow is built without GPUs: no kernels for them",
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_operations_on_tables_have_kernels_for_gpus(ranks):
    """With one that has not, TensorFlow would have a table in the host's memory (which
    `CollectiveShard` refuses).
    """
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "collective.launch",
            "-np",
            str(ranks),
            "--device",
            "cpu",
            "-m",
            "tests.gpu_double",
            "tests/gpu_placement.py",
        ],
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        text=True,
        timeout=240,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
    )
    assert (
        done.returncode == 0
        and done.stdout.count("all operations on tables have kernels for GPUs") == ranks
    ), done.stdout
