"""Programs that train on clicks as a user starts them, from training to a served model."""

from __future__ import annotations

import re

import numpy as np
import pytest
from program_launch import MODELZOO, alone, launch

from common import click_log, metrics
from hashed_ids import hashed_clicks

GROUPED = MODELZOO / "features" / "grouped_embedding"
PROGRAMS = {
    "dlrm": MODELZOO / "dlrm" / "train.py",
    "dcnv2": GROUPED / "dcnv2" / "train.py",
    "deepfm": GROUPED / "deepfm" / "train.py",
    "din": MODELZOO / "din" / "train.py",
    "hashed_ids": MODELZOO / "hashed_ids" / "train.py",
    "two_tower": MODELZOO / "two_tower" / "train.py",
}
RESULT = re.compile(r"test AUC (\d\.\d+)  log loss (\d\.\d+)  \((\d+) rows, after step (\d+)\)")
WAY = re.compile(r"(\d+\.\d)% of the way from 0.5 to the best possible AUC")
SMALL = ("--rows", 4000, "--batch-size", 96, "--steps", 30, "--dim", 4)

ASK = """
import os, sys
import numpy as np
import tensorflow as tf
folder, = os.listdir(sys.argv[1])
served = tf.saved_model.load(os.path.join(sys.argv[1], folder)).signatures['serving_default']
rows = {name: tf.constant(values) for name, values in np.load(sys.argv[2]).items()}
np.save(sys.argv[3], served(**rows)['probability'].numpy())
foreign = {name.split('.')[0] for name in sys.modules} & {'collective', 'horovod'}
assert not foreign, foreign
"""


def scores(completed) -> list[float]:
    """Returns AUC, log loss, rows and step of the one evaluation."""
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (result,) = RESULT.findall(completed.stdout)  # one rank reports
    return [float(number) for number in result]


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    # The others take up to 27 seconds each, too many for the matrix.
    [
        "dcnv2",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("dlrm", "deepfm", "din", "two_tower")),
    ],
)
def test_training_reaches_98_percent_of_the_way(name):
    completed = launch(PROGRAMS[name], 2)
    scores(completed)
    assert float(WAY.search(completed.stdout)[1]) >= 98, completed.stdout
    assert re.search(r"[\d,]+ samples/s of all ranks, [\d,]+ MB on rank 0", completed.stdout)


# Six launches of a program and TensorFlow alone: 55 seconds (dlrm and two_tower, which has four) to
# 115 (deepfm), too many for the matrix.
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_numbers_of_ranks_agree_in_every_mode(tmp_path, name):
    """Trains on three ranks, goes on on one; evaluates, predicts and exports on others."""
    program, folder = PROGRAMS[name], tmp_path / "checkpoints"
    kept = (*SMALL, "--checkpoint-dir", folder)
    whole = scores(launch(program, 2, *SMALL))
    first = launch(program, 3, *SMALL[:-4], "--steps", 18, "--dim", 4, "--checkpoint-dir", folder)
    assert scores(first)[-1] == 18
    losses = tmp_path / "losses.tsv"
    rest = launch(program, 1, *kept, "--losses", losses)
    assert "going on after step 18" in rest.stdout
    np.testing.assert_allclose(scores(rest), whole, atol=2e-4)
    assert len(losses.read_text().splitlines()) == 12
    evaluated = scores(launch(program, 3, *kept, "--mode", "evaluate"))
    np.testing.assert_allclose(evaluated, whole, atol=2e-4)
    if name == "two_tower":  # its test rows are all clicks
        return

    predicted = launch(program, 2, *kept, "--mode", "predict", "--predictions", tmp_path / "p")
    assert predicted.returncode == 0, predicted.stderr
    lines = [line for file in (tmp_path / "p").iterdir() for line in file.read_text().splitlines()]
    probability = dict(line.split("\t") for line in lines)
    assert set(probability) == {str(row) for row in range(400)} and len(lines) == 400
    exported = launch(program, 2, *kept, "--mode", "export", "--export-dir", tmp_path / "served")
    assert exported.returncode == 0, exported.stderr

    if name == "hashed_ids":
        test, _ = hashed_clicks.generate(np.arange(3600, 4000))
    else:
        test = click_log.generate(4000, history=8 if name == "din" else 0).test
    rows = {feature: test[feature] for feature in test if feature != "label"}
    np.savez(tmp_path / "rows.npz", **rows)
    alone(ASK, tmp_path / "served", tmp_path / "rows.npz", tmp_path / "answer.npy")
    served = np.load(tmp_path / "answer.npy")
    in_order = np.array([float(probability[str(row)]) for row in range(400)])
    np.testing.assert_allclose(served, in_order, atol=2e-6)
    assert metrics.auc(test["label"], served) == pytest.approx(whole[0], abs=2e-3)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("dlrm", marks=pytest.mark.long),
        pytest.param("two_tower", marks=pytest.mark.matrix),
    ],
)
def test_fit_reaches_the_same_on_any_number_of_ranks(name):
    program = MODELZOO / name / "fit.py"
    more = ("--rows", 20_000, "--batch-size", 96, "--steps", 150)
    of_two, of_one = (scores(launch(program, ranks, *more)) for ranks in (2, 1))
    np.testing.assert_allclose(of_two, of_one, atol=2e-4)
    assert of_two[0] > 0.7 and of_two[2:] == [2000, 150]


@pytest.mark.long
def test_two_ranks_train_dlrm_on_criteos_text(tmp_path):
    random = np.random.default_rng(0)
    for name, count in (("train.txt", 300), ("eval.txt", 50)):
        lines = []
        for _ in range(count):
            counts = random.integers(0, 9, 13)
            values = [f"{value:08x}" for value in random.integers(0, 30, 26)]
            lines.append("\t".join([str(random.integers(2)), *map(str, counts), *values]))
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    options = ("--data", tmp_path, "--buckets", 100, "--batch-size", 32, "--steps", 6)
    completed = launch(PROGRAMS["dlrm"], 2, *options)
    assert scores(completed)[2:] == [50, 6]
    assert "best possible" not in completed.stdout


@pytest.mark.long
@pytest.mark.timeout(600)
def test_policies_bound_the_tables_of_hashed_ids_and_cost_no_auc(tmp_path):
    """A capacity of 40,000 rows a table, a lifetime and a filter; compared with a run without limits."""
    sizes = ("--rows", 150_000, "--steps", 260)
    limits = ("--steps-to-live", 150, "--capacity", 40_000)
    courses = {}
    for name, options in (("bounded", limits), ("unbounded", ("--unbounded",))):
        path = tmp_path / f"{name}.tsv"
        more = ("--evaluate-steps", 130, "--course", path)
        completed = launch(PROGRAMS["hashed_ids"], 2, *sizes, *options, *more)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        header, *lines = [line.split("\t") for line in path.read_text().splitlines()]
        courses[name] = [dict(zip(header, map(float, line))) for line in lines]
        assert [line["step"] for line in courses[name]] == [130, 260]
    bounded, unbounded = courses["bounded"], courses["unbounded"]
    assert all(line["rows"] <= 2 * 40_000 for line in bounded)
    assert bounded[-1]["rows"] < 0.06 * unbounded[-1]["rows"]
    assert unbounded[-1]["rows"] > 1.8 * unbounded[0]["rows"]
    assert min(bounded[-1][by] for by in ("refused", "capacity", "steps_to_live")) > 0
    assert all(line["refused"] == line["capacity"] == 0 for line in unbounded)
    assert unbounded[-1]["auc"] > 0.74
    assert bounded[-1]["auc"] == pytest.approx(unbounded[-1]["auc"], abs=0.002)


@pytest.mark.long
def test_a_mode_without_a_checkpoint_ends_the_job_with_code_2(tmp_path):
    completed = launch(
        PROGRAMS["dlrm"], 2, "--mode", "evaluate", "--checkpoint-dir", tmp_path, "--rows", 1000
    )
    assert completed.returncode == 2
    assert f"--checkpoint-dir {tmp_path} has no checkpoint" in completed.stderr
