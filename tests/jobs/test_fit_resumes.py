"""A job of `fit` goes on in the middle of an epoch, at another number of ranks, as plain Keras."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.jobs import pool

PROGRAM = Path(__file__).with_name("fit_with_checkpoints.py")


def values_of(done):
    lines = [line.partition("values ")[2] for line in done.stdout.splitlines()]
    return [[float(x) for x in line.split()] for line in lines if line]


@pytest.mark.slow
def test_fit_goes_on_in_the_epoch_at_another_number_of_ranks(tmp_path: Path):
    folder = tmp_path / "ckpt"
    plain = pool.launch("-np", 1, "--device", "cpu", PROGRAM, "plain")
    assert plain.returncode == 0, plain.stdout
    # Saves at steps 3 and 6, the first of the second epoch, and dies after 8.
    died = pool.launch("-np", 2, "--device", "cpu", PROGRAM, folder, 8)
    assert died.returncode == 3, died.stdout
    assert (folder / "model.ckpt-6.index").exists()
    died = pool.launch("-np", 1, "--device", "cpu", PROGRAM, folder, 9)
    assert died.returncode == 3, died.stdout
    ended = pool.launch("-np", 3, "--device", "cpu", PROGRAM, folder)
    assert ended.returncode == 0 and ended.stdout.count("steps 10") == 3, ended.stdout
    (want,) = values_of(plain)
    for values in values_of(ended):
        np.testing.assert_allclose(values, want, rtol=0, atol=5e-6)
    # What is complete is not trained again, however often it is started.
    for _ in range(2):
        again = pool.launch("-np", 2, "--device", "cpu", PROGRAM, folder)
        assert again.returncode == 0 and again.stdout.count("steps 10") == 2, again.stdout
