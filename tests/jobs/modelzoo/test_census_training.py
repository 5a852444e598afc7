"""train.py as a user starts it: on the census rows that come along, and on the click log."""

from __future__ import annotations

import re

import pytest
from program_launch import CENSUS_INCOME, NO_NETWORK, launch, train

RESULT = re.compile(r"test AUC (\d\.\d+)  accuracy (\d\.\d+)  \((\d+) rows\)")


def auc(completed) -> float:
    assert completed.returncode == 0, completed.stdout + completed.stderr
    results = RESULT.findall(completed.stdout)
    assert len(results) == 1, completed.stdout  # one rank reports
    assert results[0][2] == "16281"
    return float(results[0][0])


@pytest.fixture(scope="module")
def bare_machine(tmp_path_factory) -> dict[str, str | None]:
    """Returns the environment of a machine without data and network.

    All ranks of the first launch prepare the rows that come along at once.
    """
    home = tmp_path_factory.mktemp("tfds")
    return {"COLLECTIVE_DATA_DIR": None, "TFDS_DATA_DIR": str(home), **NO_NETWORK}


@pytest.mark.long
def test_two_ranks_train_on_the_generated_click_log():
    options = ("--data", "generated", "--steps", 300, "--optimizer", "adam", "--dim", 4)
    completed = train(2, *options)
    reached = auc(completed)
    best = float(
        re.search(r"best possible AUC on these generated rows is (\d\.\d+)", completed.stdout)[1]
    )
    assert best - 0.04 < reached < best + 0.005
    progress = re.findall(r"step (\d+)/300 .* samples/s", completed.stderr)
    assert progress == [str(step) for step in range(30, 301, 30)]


@pytest.mark.long
def test_a_batch_size_that_three_ranks_do_not_divide_ends_the_job_with_code_2():
    completed = train(3, "--batch-size", 256, "--click-log")
    assert completed.returncode == 2
    lines = completed.stderr.splitlines()
    errors = [line for line in lines if line.startswith("[0]") and "error:" in line]
    assert len(errors) == 1 and "the nearest that they do is 255" in errors[0]


@pytest.mark.parametrize(
    "ranks, options",
    [
        pytest.param((2, 1), (), marks=pytest.mark.matrix),
        pytest.param((3, 1), ("--steps", 40), marks=pytest.mark.long),
        pytest.param((3, 2, 1), (), marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_the_census_auc_is_reached_and_does_not_depend_on_the_number_of_ranks(
    bare_machine, ranks, options
):
    completed = [train(count, *options, **bare_machine) for count in ranks]
    reached = [auc(each) for each in completed]
    assert max(reached) - min(reached) < 1.01e-4, reached
    if not options:
        assert min(reached) >= 0.905
        seen = completed[0].stdout.partition("What you just saw\n")[2]
        each = rf"  ranks +{ranks[0]}, each with a part of every table \(backend hb\)\n"
        assert re.search(each, seen)
        assert re.search(r"  test AUC +0\.91\d\d; PERSIA publishes 0\.8929 on these rows\n", seen)


@pytest.mark.long
def test_the_census_auc_is_reached_by_fit_which_goes_on_and_exports(bare_machine, tmp_path):
    """Two ranks train; one begins with their checkpoint, has nothing left to do, and exports."""
    options = ("--checkpoint-dir", tmp_path / "ckpt", "--export-dir", tmp_path / "served")
    first = launch(CENSUS_INCOME / "fit.py", 2, *options[:2], **bare_machine)
    second = launch(CENSUS_INCOME / "fit.py", 1, *options, **bare_machine)
    assert auc(first) >= 0.905
    assert auc(second) == pytest.approx(auc(first), abs=1.01e-4)
    assert "Epoch 8/8" in first.stdout and "Epoch 1/8" not in second.stdout
    assert list((tmp_path / "served").glob("*/saved_model.pb"))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 5))
def test_the_census_auc_is_reached_with_other_seeds_and_again_with_the_same(bare_machine, seed):
    first, second = [auc(train(2, "--seed", seed, **bare_machine)) for _ in range(2)]
    assert first == second >= 0.905


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adadelta", "adam", "ftrl", "momentum", "rmsprop", "sgd"])
def test_the_census_auc_is_reached_with_other_optimizers(bare_machine, optimizer):
    assert auc(train(2, "--optimizer", optimizer, **bare_machine)) >= 0.905
