"""A save and a restore take no memory that grows with the tables: what training has, and 64 MB.

Training itself has some that grows, which isn't ours: TensorFlow's allocator takes up to a sixteenth
more for a variable than its bytes (768 MB lie in 800, in plain TensorFlow, too).
"""

import json

import pytest

from tests.jobs import pool

PROGRAM = pool.ROOT / "tests/jobs/memory_of_saves.py"
BUFFER = 128  # MB
MOST = 64  # MB


@pytest.mark.parametrize(
    "megabytes",
    [
        pytest.param(1 << 10, marks=[pytest.mark.matrix, pytest.mark.timeout(300)]),
        pytest.param(10 << 10, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
)
def test_a_save_takes_64_mb_beside_what_training_has(tmp_path, megabytes):
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
        assert training <= 300 + megabytes / 2 / 16, of_rank
        assert of_rank["blocking"] <= training + MOST, of_rank
        assert of_rank["beside"] <= training + MOST + BUFFER, of_rank
        assert of_rank["restore"] <= training + MOST, of_rank
