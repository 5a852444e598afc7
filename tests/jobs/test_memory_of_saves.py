"""Training, a save and a restore take no memory that grows with the tables in addition to their
rows.

What is there in any case, TensorFlow itself, takes some 200 MB.
"""

import json

import pytest

from tests.jobs import pool

PROGRAM = pool.ROOT / "tests/jobs/memory_of_saves.py"
BUFFER = 128  # MB
ALL, MOST = 300, 64  # MB beyond the shards; and beyond what training has


@pytest.mark.parametrize(
    "megabytes",
    [
        pytest.param(1 << 10, marks=[pytest.mark.matrix, pytest.mark.timeout(300)]),
        pytest.param(10 << 10, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
)
def test_memory_beyond_the_shards(tmp_path, megabytes):
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
        print(of_rank)
        training = of_rank["training"]
        assert of_rank["blocking"] <= min(ALL, training + MOST), of_rank
        assert of_rank["background"] <= min(ALL, training + MOST) + BUFFER, of_rank
        assert of_rank["restore"] <= min(ALL, training + MOST), of_rank
