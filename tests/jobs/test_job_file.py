"""Jobs of a job file: a Trainer's, a session's, and ones that fail."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.jobs import pool

FOLDER = os.path.dirname(__file__)
PROGRAM = os.path.join(FOLDER, "trained_by_job_file.py")
JOB: dict[str, Any] = {
    "name": "tried",
    "entrypoint": PROGRAM,
    "slots": 2,
    "seed": 5,
    "hyperparameters": {"global_batch_size": 12, "lr": 0.5},
    "max_length": {"epochs": 2},
    "checkpoints": {"folder": "model", "period": {"batches": [2, 5]}, "keep": 2},
    "metrics": {
        "validation_period": {"epochs": 1},
        "reporting_period": {"batches": 4},
        "step_zero_validation": True,
    },
    "searcher": {"metric": "auc", "smaller_is_better": False},
    "strategy": {"plan": "quiet"},
}
SESSION = """
import tensorflow.compat.v1 as tf
import collective

strategy = collective.CollectiveStrategy()
with strategy.scope(), tf.Graph().as_default():
    with strategy.embedding_scope():
        table = tf.get_variable("t", [10, 2])
    loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2]))
    train_op = tf.train.AdagradOptimizer(collective.job_info().hyperparameters["lr"]).minimize(loss)
    with tf.train.MonitoredTrainingSession("") as session:
        session.run(train_op)
print("lr", collective.job_info().hyperparameters["lr"])
"""
FAILING = """
import os
import sys

count = os.environ["COLLECTIVE_RESTART_COUNT"]
print(f"attempt {count}", flush=True)
if count == "1":
    print("CUDA out of memory", file=sys.stderr, flush=True)
sys.exit(3)
"""


def launch(folder: Path, job: dict[str, Any], *words: object, timeout: float = 150) -> Any:
    (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    return pool.launch("--device", "cpu", "job.yaml", *words, cwd=folder, timeout=timeout)


def trained(done: Any) -> set[str]:
    assert done.returncode == 0, done.stdout
    return set(re.findall("trained (.*)", done.stdout))


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_trainer_of_the_file_is_that_of_the_arguments(tmp_path, ranks):
    """100 records in batches of 12: epochs end after the steps 9 and 17."""
    [by_file] = trained(launch(tmp_path, {**JOB, "slots": ranks}))
    words = ("-np", ranks, "--device", "cpu", PROGRAM, "itself", tmp_path / "other")
    [by_arguments] = trained(pool.launch(*words, timeout=150))
    assert by_file == by_arguments
    assert by_file.startswith("17 [0, 9, 17] [4, 8, 12, 16, 17] best ")
    for folder in ("model", "other"):
        names = {path.name for path in (tmp_path / folder).glob("*.index")}
        assert names == {"model.ckpt-9.index", "model.ckpt-17.index"}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_set_has_an_effect_and_two_values_are_an_error(tmp_path):
    done = launch(
        tmp_path,
        JOB,
        *("--set", "hyperparameters.lr=0.001", "--set", "checkpoints.folder=slow"),
        *("--set", "max_length.epochs=1", "--set", "metrics.step_zero_validation=false"),
    )
    [line] = trained(done)
    assert line.startswith("9 [9] [4, 8, 9]") and (tmp_path / "slow").is_dir()
    both = launch(tmp_path, {**JOB, "entrypoint": f"{PROGRAM} otherwise"})
    assert both.returncode == 1
    words = "fit(max_length)=Batch(value=3), but the job file has max_length: {'epochs': 2}."
    assert words in both.stdout and not (tmp_path / "model" / "checkpoint").exists()


@pytest.mark.timeout(200)
def test_a_session_is_told_which_keys_have_no_effect(tmp_path):
    (tmp_path / "session.py").write_text(SESSION)
    done = launch(tmp_path, {**JOB, "entrypoint": "session.py"})
    assert done.returncode == 0 and done.stdout.count("lr 0.5") == 2
    keys = "seed, max_length, checkpoints.folder, checkpoints.period, checkpoints.keep, metrics."
    assert done.stdout.count(f"of the job file, {keys}") == 1
    assert "the plan of 2 ranks" not in done.stdout  # strategy: {plan: quiet}
    own = {name: JOB[name] for name in ("slots", "hyperparameters")}
    done = launch(tmp_path, {**own, "entrypoint": "session.py"})
    assert "of the job file" not in done.stdout and "the plan of 2 ranks" in done.stdout


@pytest.mark.timeout(100)
def test_a_line_ends_restarts(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    job = {
        "entrypoint": "failing.py",
        "max_restarts": 5,
        "log_policies": [{"pattern": "out of memory", "action": {"type": "cancel_retries"}}],
        "environment": {"COLLECTIVE_INDEPENDENT": 1},
    }
    done = launch(tmp_path, job, "--restart-pause", 0, "--tee", "none")
    assert done.returncode == 3 and "restart    1 of 5" in done.stdout
    assert "no restart: rank 0 wrote 'CUDA out of memory'" in done.stdout
    assert "attempt 2" not in done.stdout
