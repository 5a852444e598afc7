"""A job that is killed time and again loses nothing: with data that go on where they stopped,
checkpoints written during training, increments between them, and restarts.
"""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective import checkpoint
from tests.jobs import pool
from tests.jobs.long_job import BATCH, EPOCHS, RECORDS, STEPS

PROGRAM = Path(__file__).with_name("long_job.py")


def launched(folder: Path, launch: int, ranks: int, kills: int = 0, restarts: int = 0):
    """Runs a job of `ranks`, of which `kills` attempts are killed; returns its code and output."""
    folder.mkdir(exist_ok=True)
    (folder / "records").write_text("".join(f"{i}\n" for i in range(RECORDS)))
    limits = ("--max-restarts", restarts, "--restart-pause", 0.05) if restarts else ()
    start = ("-np", ranks, "--device", "cpu", *limits)
    done = pool.launch(*start, PROGRAM, folder, launch, kills, timeout=150 + 40 * kills)
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Runs the job of two ranks that nobody kills: its folder, its output."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, output = launched(folder, 0, 2)
    assert code == 0, output
    return folder, output


def used_at(folder: Path) -> dict[int, set[tuple[int, ...]]]:
    """Returns the records that all ranks together used at each step, in each attempt that did."""
    parts: dict[tuple[str, int], list[int]] = collections.defaultdict(list)
    ranks: dict[tuple[str, int], int] = collections.Counter()
    of_attempt: dict[str, int] = collections.Counter()
    for file in folder.glob("used_*"):
        attempt = file.name.rpartition("_")[0]
        of_attempt[attempt] += 1
        for line in file.read_text().splitlines():
            if not line.endswith("]]"):  # The rank was killed in the middle of it.
                continue
            step, ids = json.loads(line)
            parts[attempt, step] += ids
            ranks[attempt, step] += 1
    steps: dict[int, set[tuple[int, ...]]] = collections.defaultdict(set)
    for (attempt, step), ids in parts.items():
        if ranks[attempt, step] == of_attempt[attempt]:  # All ranks lived to write it down.
            steps[step].add(tuple(sorted(ids)))
    return steps


def check_that_each_record_was_used_once_an_epoch(folder: Path) -> None:
    steps = used_at(folder)
    assert sorted(steps) == list(range(STEPS))
    # Attempts that take a step again take it with the same records.
    assert {len(batches) for batches in steps.values()} == {1}
    counts = collections.Counter(id for (batch,) in steps.values() for id in batch)
    assert counts == dict.fromkeys(range(RECORDS), EPOCHS)
    assert STEPS * BATCH == RECORDS * EPOCHS


def last_state(folder: Path) -> dict[str, np.ndarray]:
    latest = tf.train.latest_checkpoint(str(folder / "saved"))
    opened = checkpoint.load(latest)
    assert int(opened["global_step"]) == STEPS and int(opened["data/position"]) == STEPS
    state = {"static": np.asarray(opened["static"])}
    dynamic = opened["dynamic"]
    state["keys"] = np.sort(np.concatenate([keys for keys, _ in dynamic.blocks()]))
    state["dynamic"] = dynamic.lookup(state["keys"])
    return state


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(2, marks=[pytest.mark.long, pytest.mark.timeout(300)]),
        pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
    ],
)
def test_restarts_at_the_same_number_of_ranks_give_the_very_weights(tmp_path, undisturbed, kills):
    code, output = launched(tmp_path / "killed", 1, 2, kills, restarts=kills)
    assert code == 0, output
    assert output.count("root cause: rank") == kills
    weights = [set(re.findall("weights (.*)", text)) for text in (output, undisturbed[1])]
    assert weights[0] == weights[1] and len(weights[0]) == 1
    check_that_each_record_was_used_once_an_epoch(tmp_path / "killed")
    killed, other = last_state(tmp_path / "killed"), last_state(undisturbed[0])
    for name in other:
        np.testing.assert_array_equal(killed[name], other[name])


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param((2, 3), marks=[pytest.mark.long, pytest.mark.timeout(300)]),
        pytest.param(
            tuple(1 + i % 3 for i in range(21)),
            marks=[pytest.mark.long, pytest.mark.timeout(1200)],
        ),
    ],
)
def test_launches_at_other_numbers_of_ranks_use_each_record_once(tmp_path, undisturbed, ranks):
    for launch, size in enumerate(ranks):
        is_last = launch == len(ranks) - 1
        code, output = launched(tmp_path / "killed", launch, size, kills=int(not is_last))
        # One that has trained to the end before its moment has lost nothing either.
        assert code == 0 or not is_last and "SIGKILL" in output, output
    check_that_each_record_was_used_once_an_epoch(tmp_path / "killed")
    killed, other = last_state(tmp_path / "killed"), last_state(undisturbed[0])
    np.testing.assert_array_equal(killed["keys"], other["keys"])
    for name in ("static", "dynamic"):
        # Sums over other numbers of ranks have another order.
        np.testing.assert_allclose(killed[name], other[name], rtol=1e-4, atol=1e-6)
