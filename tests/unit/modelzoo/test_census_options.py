"""The options that only the census programs have."""

from __future__ import annotations

import pytest

from census_income import options
from tests.unit.modelzoo import census_files

pytestmark = pytest.mark.usefixtures("no_data_dir", "no_sleep")


def test_defaults():
    defaults = options.parse([])
    assert (defaults.batch_size, defaults.epochs, defaults.steps) == (384, 8, None)
    assert (defaults.seed, defaults.dim) == (0, 8)
    assert (defaults.optimizer, defaults.learning_rate) == ("adagrad", 0.05)
    assert (defaults.census_dir, defaults.click_log) == (None, False)
    assert (defaults.checkpoint_dir, defaults.save_steps) == (None, 200)
    assert defaults.export_dir is None
    assert defaults.total_steps(32561) == 8 * 84


def test_the_data_folder_comes_from_the_option_before_the_variable(tmp_path, monkeypatch):
    for name in ("option", "variable"):
        census_files.with_header(tmp_path / name / "census-income")
    monkeypatch.setenv("COLLECTIVE_DATA_DIR", str(tmp_path / "variable"))
    option = ["--data-dir", str(tmp_path / "option")]
    assert options.parse([]).census_dir == tmp_path / "variable" / "census-income"
    assert options.parse(option).census_dir == tmp_path / "option" / "census-income"
    for generated in (["--click-log"], ["--data", "generated"]):
        assert options.parse(generated).census_dir is None
        assert options.parse(generated).click_log
    assert options.parse(["--data", "census"]).census_dir == options.parse([]).census_dir


def test_a_data_folder_without_the_census_is_an_error_and_no_other_rows_are_taken(tmp_path, capsys):
    with pytest.raises(SystemExit):
        options.parse(["--data-dir", str(tmp_path)])
    error = capsys.readouterr().err
    assert f"no adult.data and no adult.test in {tmp_path / 'census-income'}" in error
    assert "without both the files that come along are taken" in error


def test_an_export_needs_a_checkpoint(capsys):
    options.check_export(options.parse(["--export-dir", "x", "--checkpoint-dir", "y"]), 0)
    options.check_export(options.parse([]), 0)
    with pytest.raises(SystemExit):
        options.check_export(options.parse(["--export-dir", "x"]), 0)
    assert (
        "--export-dir x exports the last checkpoint, and without --checkpoint-dir there is none"
        in capsys.readouterr().err
    )
