"""Random programs of tables go on at other numbers of ranks, and leave what dictionaries have."""

import re

import pytest

from tests.jobs import pool


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param((2, 3), marks=pytest.mark.matrix),
        pytest.param((2, 3, 1, 2), marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [100, 101])
def test_a_program_goes_on_at_another_number_of_ranks(tmp_path, seed, numbers):
    """Each job trains, evaluates, removes and saves, and compares all rows, last uses, frequencies
    and statistics with dictionaries that no restart has interrupted.
    """
    steps = [0]
    for ranks in numbers:
        done = pool.launch(
            *("-np", ranks, "--device", "cpu", "--tee", "0"),
            *(pool.ROOT / "tests/jobs/program_of_tables.py", seed, tmp_path),
            environment={"COLLECTIVE_STRATEGY": "sok" if ranks == 3 else "hb"},
        )
        assert done.returncode == 0
        found = re.search(rf"after step (\d+) on {ranks}: rows (\d+)", done.stdout)
        steps.append(int(found[1]))
        assert int(found[2]) > 0
    assert steps == sorted(set(steps))
