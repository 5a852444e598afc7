"""Census income from checkpoint to served model, by a session and by an Estimator."""

from __future__ import annotations

import re
import signal
import subprocess
import time

import numpy as np
import pytest
from program_launch import CENSUS_INCOME, ROOT, alone, command, environ, launch, train

from census_income import click_log
from census_income.columns import CATEGORICAL, LABEL, NUMERIC
from common import metrics

RESULT = re.compile(r"test AUC (\d\.\d+)  accuracy (\d\.\d+)  \(16281 rows\)")
QUICK = ("--click-log", "--steps", 250, "--optimizer", "adam", "--learning-rate", 0.003)

ASK = """
import os, sys
import numpy as np
import tensorflow as tf
folder, = os.listdir(sys.argv[1])
served = tf.saved_model.load(os.path.join(sys.argv[1], folder)).signatures['serving_default']
rows = {}
for name, column in np.load(sys.argv[2]).items():
    rows[name] = tf.constant(column.tolist(), tf.int64 if column.dtype.kind == 'i' else tf.string)
np.save(sys.argv[3], served(**rows)['probability'].numpy())
foreign = {name.split('.')[0] for name in sys.modules} & {'collective', 'horovod'}
assert not foreign, foreign
"""


def auc(completed) -> float:
    assert completed.returncode == 0, completed.stdout + completed.stderr
    ((reached, _),) = RESULT.findall(completed.stdout)  # one rank reports
    return float(reached)


def served_auc(folder, tmp_path) -> float:
    """Asks the exported model about the click log's test rows; returns the AUC of its answers."""
    test = click_log.generate().test
    np.savez(tmp_path / "rows.npz", **{name: test[name] for name in (*CATEGORICAL, *NUMERIC)})
    alone(ASK, folder, tmp_path / "rows.npz", tmp_path / "answer.npy")
    return metrics.auc(test[LABEL], np.load(tmp_path / "answer.npy"))


def has_trained(folder) -> bool:
    """Tells whether the latest checkpoint is one after the start."""
    state = folder / "checkpoint"
    return state.exists() and 'ckpt-0"' not in state.read_text().partition("\n")[0]


@pytest.fixture(scope="module")
def uninterrupted() -> float:
    return auc(train(1, *QUICK))


@pytest.mark.long
def test_killed_and_continued_on_another_number_of_ranks_it_is_an_uninterrupted_run(
    tmp_path, uninterrupted
):
    """And what it exports at the end is served by TensorFlow alone."""
    folder = tmp_path / "checkpoints"
    options = (*QUICK, "--checkpoint-dir", folder, "--save-steps", 20)
    with subprocess.Popen(
        command(CENSUS_INCOME / "train.py", 2, *options),
        cwd=ROOT,
        env=environ(),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as killed:
        deadline = time.monotonic() + 100
        while not has_trained(folder):
            assert killed.poll() is None, killed.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        killed.send_signal(signal.SIGTERM)  # to the launcher, which ends the ranks
        killed.communicate(timeout=60)

    rest = train(1, *options, "--export-dir", tmp_path / "export")
    reached = auc(rest)
    finished = int(re.search(r"going on after step (\d+), from", rest.stdout)[1])
    assert 0 < finished < 250
    assert abs(reached - uninterrupted) < 1.01e-4
    assert served_auc(tmp_path / "export", tmp_path) == pytest.approx(reached, abs=1e-4)


@pytest.mark.long
def test_an_estimator_reaches_the_same_auc_and_exports_the_same_model(tmp_path, uninterrupted):
    """The network's initial values differ: TensorFlow draws them by the number of operations made
    before.
    """
    reached = auc(
        launch(CENSUS_INCOME / "train_estimator.py", 2, *QUICK, "--export-dir", tmp_path / "export")
    )
    assert abs(reached - uninterrupted) < 3e-3
    # Estimator's AUC has thresholds
    assert served_auc(tmp_path / "export", tmp_path) == pytest.approx(reached, abs=2e-4)


@pytest.mark.long
def test_an_estimator_reaches_the_census_auc(census_data):
    reached = [
        auc(launch(CENSUS_INCOME / "train_estimator.py", ranks, **census_data))
        for ranks in (1, 2, 3)
    ]
    assert max(reached) - min(reached) < 2.01e-4, reached
    assert abs(reached[0] - auc(train(2, **census_data))) < 1e-3
