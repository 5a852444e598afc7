"""Where tables would be on a GPU: TensorFlow knows its kernels for GPUs also on a machine without
one.
"""

import pytest
import tensorflow as tf

from tests.jobs import pool


@pytest.mark.sample(1)
@pytest.mark.skipif(
    not tf.test.is_built_with_cuda(),
    reason="this TensorFlow is built without GPUs: no kernels for them",
)
@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 1])
def test_operations_on_tables_have_kernels_for_gpus(ranks):
    """With one that has not, TensorFlow would have a table in the host's memory."""
    done = pool.launch(
        *("-np", ranks, "--device", "cpu"),
        *("-m", "tests.gpu_double", "tests/jobs/gpu_placement.py"),
    )
    assert (
        done.returncode == 0
        and done.stdout.count("all operations on tables have kernels for GPUs") == ranks
    ), done.stdout
