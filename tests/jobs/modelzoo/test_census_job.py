"""The census as a job file: trained by a Trainer on slots, exported, and answered."""

import re

import pytest
from program_launch import CENSUS_INCOME, launch

pytestmark = pytest.mark.matrix
REPORTED = re.compile(r"(test|served) AUC (\d\.\d+)")


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_served_is_what_was_trained(tmp_path, ranks):
    changes = ("--set", "max_length.epochs=3", "--set", f"checkpoints.folder={tmp_path / 'model'}")
    done = launch(CENSUS_INCOME / "job.yaml", ranks, *changes)
    assert done.returncode == 0, done.stdout + done.stderr
    reported = dict(REPORTED.findall(done.stdout))
    assert reported["served"] == reported["test"] and float(reported["test"]) > 0.905, done.stdout
