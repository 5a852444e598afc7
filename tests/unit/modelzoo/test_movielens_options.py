"""The options that only the movie ratings' program has."""

from __future__ import annotations

from pathlib import Path

import pytest

from movielens import options

pytestmark = pytest.mark.usefixtures("no_data_dir", "no_sleep")


def make_data_dir(folder: Path, handle: str) -> Path:
    """Makes a data directory that looks as if it held the ratings."""
    version = folder / handle / "100k-ratings" / "0.1.1"
    version.mkdir(parents=True)
    (version / "dataset_info.json").touch()
    return folder


def test_defaults():
    defaults = options.parse([])
    assert (defaults.batch_size, defaults.epochs, defaults.steps) == (240, 6, None)
    assert (defaults.seed, defaults.dim) == (0, 8)
    assert (defaults.optimizer, defaults.learning_rate) == ("adam", 0.005)
    assert (defaults.data_dir, defaults.generated) == (None, False)
    assert (defaults.model_dir, defaults.export_dir) == (None, None)
    assert defaults.total_steps(80000) == 6 * 333


@pytest.mark.parametrize("handle", ["movie_lens", "movielens"])
def test_the_data_directory_comes_from_the_option_before_the_variable(
    tmp_path, monkeypatch, handle
):
    of_option = make_data_dir(tmp_path / "option", handle)
    of_variable = make_data_dir(tmp_path / "variable" / "movielens", handle)
    monkeypatch.setenv("COLLECTIVE_DATA_DIR", str(tmp_path / "variable"))
    assert options.parse([]).data_dir == of_variable
    assert options.parse(["--data-dir", str(of_option)]).data_dir == of_option
    assert options.parse(["--generated"]).data_dir is None


def test_a_folder_of_other_data_sets_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("COLLECTIVE_DATA_DIR", str(tmp_path))
    assert options.parse([]).data_dir is None
