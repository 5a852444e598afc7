"""train.py where MovieLens can't be had, and the model it exports, asked by TensorFlow alone."""

from __future__ import annotations

import re

import numpy as np
import pytest
from program_launch import MOVIELENS, NO_NETWORK, alone, launch

from common import metrics
from movielens import ratings

RESULT = re.compile(r"test AUC (\d\.\d+)  log loss (\d\.\d+)  \((\d+) ratings, after step (\d+)\)")
# two evaluations: an epoch has 66 steps
SMALL = ("--ratings", 8000, "--batch-size", 96, "--steps", 150)

ASK = f"""
import sys
sys.path.insert(0, {str(MOVIELENS)!r})
import numpy as np
import serve
served = serve.tf.saved_model.load(serve.latest(sys.argv[1])).signatures['serving_default']
ids = np.load(sys.argv[2])
names = ('user_id', 'movie_id')
answer = served(**{{name: serve.tf.constant(ids[name].tolist()) for name in names}})
np.save(sys.argv[3], answer['probability'].numpy())
foreign = {{name.split('.')[0] for name in sys.modules}} & {{'collective', 'horovod'}}
assert not foreign, foreign
"""


def results(completed) -> list[tuple[float, ...]]:
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return [tuple(map(float, numbers)) for numbers in RESULT.findall(completed.stdout)]


@pytest.mark.long
def test_two_ranks_train_and_export_what_tensorflow_alone_serves(tmp_path):
    completed = launch(
        MOVIELENS / "train.py",
        2,
        *SMALL,
        "--export-dir",
        tmp_path / "export",
        COLLECTIVE_DATA_DIR=None,
        TFDS_DATA_DIR=str(tmp_path / "tfds"),
        **NO_NETWORK,
    )
    evaluations = results(completed)
    assert [(count, step) for _, _, count, step in evaluations] == [
        (1600, 66),
        (1600, 132),
        (1600, 150),
    ]
    assert (
        completed.stdout.count("could not be downloaded, so generated ratings take its place") == 1
    )
    reference = re.search(r"is AUC (\S+)  log loss (\S+)", completed.stdout)
    best = [float(score) for score in reference.groups()]
    auc, log_loss = evaluations[-1][:2]
    assert 0.6 < auc < best[0] + 0.005 and log_loss > best[1] - 0.005

    test = ratings.generate(8000).test
    np.savez(tmp_path / "ids.npz", user_id=test.user_id, movie_id=test.movie_id)
    alone(ASK, tmp_path / "export", tmp_path / "ids.npz", tmp_path / "answer.npy")
    served = np.load(tmp_path / "answer.npy")
    # Estimator's AUC has thresholds.
    assert metrics.auc(test.high, served) == pytest.approx(auc, abs=1e-3)
    assert metrics.log_loss(test.high, served) == pytest.approx(log_loss, abs=1e-4)

    user, movie = test.user_id[0], test.movie_id[0]
    question = ("--user", user, "--movies", movie, "new")
    answers = alone(MOVIELENS / "serve.py", tmp_path / "export", *question).splitlines()
    assert answers[0] == f"user {user}  movie {movie}  {served[0]:.4f}"
    assert re.fullmatch(rf"user {user}  movie new  0\.\d+", answers[1])

    rest = launch(MOVIELENS / "train.py", 1, *SMALL, "--generated")
    np.testing.assert_allclose(
        results(rest), evaluations, atol=2e-4
    )  # whatever the number of ranks


@pytest.mark.slow
def test_without_an_exported_model_there_is_one_line():
    with pytest.raises(AssertionError, match="serve.py: error: no SavedModel in /nowhere"):
        alone(MOVIELENS / "serve.py", "/nowhere", "--user", 7, "--movies", 1)


@pytest.mark.long
def test_training_goes_on_where_it_ended_on_another_number_of_ranks(tmp_path):
    whole = results(launch(MOVIELENS / "train.py", 2, *SMALL, "--generated"))
    first = (*SMALL[:-1], 100, "--generated", "--model-dir", tmp_path)
    results(launch(MOVIELENS / "train.py", 3, *first))
    rest = results(
        launch(MOVIELENS / "train.py", 1, *SMALL, "--generated", "--model-dir", tmp_path)
    )
    np.testing.assert_allclose(rest[-1], whole[-1], atol=2e-4)
    again = results(
        launch(MOVIELENS / "train.py", 2, *SMALL, "--generated", "--model-dir", tmp_path)
    )
    # Nothing is left to train, but it reports the scores.
    np.testing.assert_allclose(again, rest[-1:], atol=1e-4)


@pytest.mark.slow
def test_two_towers_by_fit_are_the_same_on_any_number_of_ranks_and_served(tmp_path):
    program, small = MOVIELENS / "fit.py", (*SMALL, "--generated")
    of_two = results(launch(program, 2, *small, "--export-dir", tmp_path))
    np.testing.assert_allclose(results(launch(program, 1, *small)), of_two, atol=2e-4)
    ((auc, log_loss, count, step),) = of_two
    assert 0.6 < auc and (count, step) == (1600, 150)

    test = ratings.generate(8000).test
    np.savez(tmp_path / "ids.npz", user_id=test.user_id, movie_id=test.movie_id)
    alone(ASK, tmp_path, tmp_path / "ids.npz", tmp_path / "answer.npy")
    served = np.load(tmp_path / "answer.npy")
    assert metrics.auc(test.high, served) == pytest.approx(auc, abs=1e-3)
    assert metrics.log_loss(test.high, served) == pytest.approx(log_loss, abs=1e-4)

    user, movie = test.user_id[0], test.movie_id[0]
    answer = alone(MOVIELENS / "serve.py", tmp_path, "--user", user, "--movies", movie)
    assert answer == f"user {user}  movie {movie}  {served[0]:.4f}\n"
