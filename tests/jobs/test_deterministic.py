"""Two launches with scope(deterministic=True) on one number of ranks give the same bits."""

import pytest

from tests.jobs import pool


def launch(ranks, folder, backend):
    """Returns the lines that each rank printed."""
    done = pool.launch(
        *("-np", ranks, "--device", "cpu", "--tee", "none", "--log-dir", folder),
        "tests/jobs/deterministic_training.py",
        environment={"COLLECTIVE_STRATEGY": backend},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    printed = [(folder / f"rank.{rank}" / "stdout").read_text() for rank in range(ranks)]
    assert all(printed)
    return printed


@pytest.mark.sample(1)
@pytest.mark.matrix
@pytest.mark.parametrize("ranks, backend", [(3, "sok"), (2, "hb")])
def test_two_launches_give_the_same_bits(ranks, backend, tmp_path):
    one, other = (launch(ranks, tmp_path / str(i), backend) for i in range(2))
    assert one == other
