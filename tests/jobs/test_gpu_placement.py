"""Where a machine with a GPU would have what the library makes: TensorFlow knows its kernels for GPUs
also on a machine without one.
"""

import pytest
import tensorflow as tf

from tests.jobs import pool


@pytest.mark.sample(1)
@pytest.mark.skipif(
    not tf.test.is_built_with_cuda(),
    reason="this TensorFlow is built without GPUs: no kernels for them",
)
@pytest.mark.long
@pytest.mark.parametrize("backend", ["sok", "hb"])
@pytest.mark.parametrize("ranks", [2, 1])
def test_a_session_places_tables_where_they_belong(ranks, backend):
    """Without soft placement, and whatever devices the script is written for. With one operation
    that has no kernel for GPUs, TensorFlow would refuse the graph, or have tables in the host's
    memory.
    """
    done = pool.launch(
        *("-np", ranks, "--device", "cpu"),
        "tests/jobs/gpu_placement.py",
        environment={"COLLECTIVE_STRATEGY": backend},
    )
    assert done.returncode == 0 and done.stdout.count("everything is placed") == ranks, done.stdout
