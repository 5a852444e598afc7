"""Training on several hosts gives what training on one gives, to the last bit."""

from __future__ import annotations

import re

import pytest

from tests.jobs import pool
from tests.jobs.launch.conftest import ROOT
from tests.jobs.test_preemption import PROGRAM

pytestmark = [pytest.mark.timeout(280), pytest.mark.matrix]
STEPS = 12


def weights(output):
    """Returns the bits of the weights at the end, the same on all ranks."""
    [found] = set(re.findall("weights (.*)", output))
    return found


def on_one_host(folder, ranks):
    folder.mkdir()
    done = pool.launch("-np", ranks, "--device", "cpu", PROGRAM, folder, STEPS, timeout=150)
    assert done.returncode == 0, done.stdout
    return weights(done.stdout)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("count", "ranks"), [(2, 2), (3, 1)])
def test_training_ends_with_the_weights_of_one_host(hosts, count, ranks, tmp_path):
    hosts.make(count)
    folder = tmp_path / "job"
    folder.mkdir()
    launchers = hosts.start_all(ranks, "--device", "cpu", ROOT / PROGRAM, folder, STEPS)
    ends = hosts.ends(launchers, 150)
    assert [code for code, _, _ in ends] == [0] * count, ends[0][2]
    assert weights(ends[0][1]) == on_one_host(tmp_path / "one", count * ranks)


@pytest.mark.long
def test_a_job_goes_on_when_its_launchers_are_started_again(hosts, tmp_path):
    """As a scheduler does: a host is lost, all launchers end, and each is restarted."""
    hosts.make(2)
    folder = tmp_path / "job"
    folder.mkdir()
    job = ("--device", "cpu", ROOT / PROGRAM, folder, STEPS)
    first = hosts.start_all(1, "--max-restarts", 2, *job, "1:6:stop")
    hosts.wait_until((folder / "1_6_stop.happened").exists, "the sixth step", 100)
    first[1].kill()
    ends = hosts.ends(first, 100)
    assert [code for code, _, _ in ends] == [137, -9]
    assert "no restart: host h2 is gone" in ends[0][2]
    ends = hosts.ends(hosts.start_all(1, *job, "1:6:stop"), 150)
    assert [code for code, _, _ in ends] == [0, 0], ends[0][2]
    assert "began at 4" in ends[0][1]
    assert weights(ends[0][1]) == on_one_host(tmp_path / "one", 2)


@pytest.mark.long
@pytest.mark.parametrize("told", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_rank_that_dies_or_is_told_to_stop_costs_no_step(hosts, told, tmp_path):
    """It dies at one step, the job starts again; a signal at another step stops all, who save."""
    hosts.make(2)
    folder = tmp_path / "job"
    folder.mkdir()
    restarts = ("--max-restarts", 1, "--restart-pause", 0.1, "--device", "cpu")
    events = (f"{1 - told}:5:kill", f"{told}:7:term")
    job = (*restarts, ROOT / PROGRAM, folder, STEPS)
    ends = hosts.ends(hosts.start_all(1, *job, *events), 150)
    assert [code for code, _, _ in ends] == [143, 143], ends[0][2]
    for _, _, stderr in ends:
        assert f"root cause: rank {1 - told} of 2" in stderr
        assert "restart    1 of 1 in 0.1 s, from step 4" in stderr
        assert re.search(r"all ranks stopped after step [78]; .*\n?.* from step [78]\n", stderr)
    ends = hosts.ends(hosts.start_all(1, *job, *events), 150)
    assert [code for code, _, _ in ends] == [0, 0], ends[0][2]
    assert weights(ends[0][1]) == on_one_host(tmp_path / "one", 2)
