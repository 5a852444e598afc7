"""A rank dies or fails in `fit`, in its validation, or while peers save: the job ends and restarts.

It then has the weights of plain Keras in one process, which nobody has disturbed.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.jobs import pool
from tests.jobs.resumable_fit import STEPS
from tests.jobs.test_preempted_fit import EPOCHS, PROGRAM, plain_weights

# Step 8 is saved after the callback, step 6 isn't; ranks have validated after step 9.
MOMENTS = ("1:step:6", "0:validated:3", "1:validated:2", "1:step:8")
CASES = [
    (ranks, f"{moment}:{how}") for ranks, how in ((2, "kill"), (3, "raise")) for moment in MOMENTS
]
IN_SLOW = [(2, "1:step:8:kill"), (3, "0:validated:3:raise")]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "ranks, fault",
    [pytest.param(*c, marks=[pytest.mark.matrix] * (c not in IN_SLOW)) for c in CASES],
)
def test_a_job_with_a_fault_in_fit_ends_with_the_same_weights(tmp_path, ranks, fault):
    folder = tmp_path / "job"
    folder.mkdir()
    start = ("-np", ranks, "--device", "cpu", "--max-restarts", 1, "--restart-pause", 0.1)
    done = pool.launch(*start, PROGRAM, folder, EPOCHS, "often", fault, timeout=150)
    assert done.returncode == 0, done.stdout
    assert f"root cause: rank {fault[0]} of {ranks}" in done.stdout
    saved = 4 if fault.startswith("1:step") else 8
    assert f"from step {saved}," in done.stdout
    found = re.findall(r"weights (\w+) at (\d+)", done.stdout)
    assert len(found) == ranks and {steps for _, steps in found} == {str(EPOCHS * STEPS)}
    assert len({digest for digest, _ in found}) == 1
    want = plain_weights(tmp_path / "plain")
    got = np.load(folder / f"weights{ranks}.0.npy")
    # Adam divides by the roots of small moments.
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-6)
