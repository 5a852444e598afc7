"""A save takes no memory that grows with the tables: what a process has anyway, and 300 MB."""

import json

import pytest

from tests.jobs import pool

PROGRAM = pool.ROOT / "tests/jobs/memory_of_saves.py"
BUFFER = 128  # MB


@pytest.mark.parametrize(
    "megabytes",
    [
        pytest.param(1 << 10, marks=[pytest.mark.matrix, pytest.mark.timeout(300)]),
        pytest.param(10 << 10, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
)
def test_a_save_takes_300_mb_beyond_the_shards(tmp_path, megabytes):
    """Real processes: those of the pool share memory with their server."""
    done = pool.launch(
        "-np", 2, "--device", "cpu", PROGRAM, tmp_path, megabytes, BUFFER,
        timeout=1700, pool=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    beyond = [
        json.loads(line.split("beyond")[1]) for line in done.stdout.splitlines() if "beyond" in line
    ]
    assert len(beyond) == 2
    for of_rank in beyond:
        # TensorFlow and the graph are there before: what a save adds is bounded.
        print(of_rank)
        assert of_rank["blocking"] <= 300, of_rank
        assert of_rank["beside"] <= 300 + BUFFER, of_rank
        assert of_rank["restore"] <= 300, of_rank
