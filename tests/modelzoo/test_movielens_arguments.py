"""The command line: what it accepts, and one clear sentence for what it doesn't."""

from __future__ import annotations

from pathlib import Path

import arguments
import pytest


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.delenv("COLLECTIVE_DATA_DIR", raising=False)
    monkeypatch.setattr(arguments.time, "sleep", lambda seconds: None)


def holding(folder: Path, handle: str = "movie_lens") -> Path:
    """A data directory that looks as if it held the ratings."""
    version = folder / handle / "100k-ratings" / "0.1.1"
    version.mkdir(parents=True)
    (version / "dataset_info.json").touch()
    return folder


def test_defaults():
    chosen = arguments.parse([])
    assert (chosen.batch_size, chosen.epochs, chosen.steps, chosen.seed, chosen.dim) == (
        240,
        6,
        None,
        0,
        8,
    )
    assert (chosen.optimizer, chosen.learning_rate, chosen.folder, chosen.generated) == (
        "adam",
        0.005,
        None,
        False,
    )
    assert (chosen.model_dir, chosen.export_dir) == (None, None)
    assert chosen.total_steps(80000) == 6 * 333
    assert arguments.parse(["--steps", "7", "--epochs", "3"]).total_steps(80000) == 7


@pytest.mark.parametrize("name", arguments.LEARNING_RATES)
def test_every_optimizer_has_a_learning_rate_that_can_be_changed(name):
    import rating_model
    import tensorflow.compat.v1 as tf

    chosen = arguments.parse(["--optimizer", name])
    assert chosen.learning_rate == arguments.LEARNING_RATES[name]
    assert arguments.parse(["--optimizer", name, "--learning-rate", "0.5"]).learning_rate == 0.5
    assert isinstance(rating_model.optimizer(name, chosen.learning_rate), tf.train.Optimizer)


@pytest.mark.parametrize(
    "given, complaint",
    [
        ("--epochs 0", "--epochs: '0' instead of a whole number of at least 1"),
        ("--batch-size many", "--batch-size: 'many' instead of a whole number"),
        ("--ratings 3", "--ratings: '3' instead of a whole number of at least 10"),
        ("--seed -1", "--seed: '-1' instead of a whole number from 0 to 2147483647"),
        ("--learning-rate 0", "--learning-rate: '0' instead of a number above 0"),
        ("--l2 -1", "--l2: '-1' instead of a number of at least 0"),
        ("--optimizer newton", "--optimizer: invalid choice: 'newton'"),
        ("--data-dir /nowhere", "no movie_lens/100k-ratings in /nowhere"),
    ],
)
def test_a_bad_value_is_one_line_from_rank_0_and_exit_code_2_everywhere(capsys, given, complaint):
    for rank in (0, 1):
        with pytest.raises(SystemExit) as end:
            arguments.parse(given.split(), rank)
        assert end.value.code == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        if rank:
            assert printed.err == ""
        else:
            assert complaint in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize("handle", ["movie_lens", "movielens"])
def test_the_data_directory_comes_from_the_option_before_the_variable(
    tmp_path, monkeypatch, handle
):
    given, usual = (
        holding(tmp_path / "given", handle),
        holding(tmp_path / "sets" / "movielens", handle),
    )
    monkeypatch.setenv("COLLECTIVE_DATA_DIR", str(tmp_path / "sets"))
    assert arguments.parse([]).folder == usual
    assert arguments.parse(["--data-dir", str(given)]).folder == given
    assert arguments.parse(["--generated"]).folder is None


def test_a_folder_of_other_data_sets_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("COLLECTIVE_DATA_DIR", str(tmp_path))
    assert arguments.parse([]).folder is None


def test_a_batch_that_the_ranks_do_not_divide_or_the_ratings_do_not_fill_is_an_error(capsys):
    arguments.check_batch_size(240, 0, 3)
    with pytest.raises(SystemExit):
        arguments.check_batch_size(256, 0, 3)
    assert "3 ranks do not divide it; the nearest that they do is 255" in capsys.readouterr().err
    arguments.check_ratings(100, 100, 0)
    with pytest.raises(SystemExit):
        arguments.check_ratings(101, 100, 0)
    assert "--batch-size 101 is more than the 100 training ratings" in capsys.readouterr().err
