"""The command line: what it accepts, and one clear sentence for what it doesn't."""

from __future__ import annotations

import census_files
import options
import progress
import pytest


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.delenv("COLLECTIVE_DATA_DIR", raising=False)
    monkeypatch.setattr(options.time, "sleep", lambda seconds: None)


def test_defaults():
    chosen = options.parse([])
    assert (chosen.batch_size, chosen.epochs, chosen.steps, chosen.seed, chosen.dim) == (
        384,
        8,
        None,
        0,
        8,
    )
    assert (chosen.optimizer, chosen.learning_rate, chosen.folder) == ("adagrad", 0.05, None)
    assert (chosen.checkpoint_dir, chosen.save_steps, chosen.export_dir) == (None, 200, None)
    assert chosen.total_steps(32561) == 8 * 84


def test_steps_override_epochs():
    assert options.parse(["--steps", "7", "--epochs", "3"]).total_steps(32561) == 7


@pytest.mark.parametrize("name", options.LEARNING_RATES)
def test_every_optimizer_has_a_learning_rate_that_can_be_changed(name):
    import model
    import tensorflow.compat.v1 as tf

    chosen = options.parse(["--optimizer", name])
    assert chosen.learning_rate == options.LEARNING_RATES[name]
    assert options.parse(["--optimizer", name, "--learning-rate", "0.5"]).learning_rate == 0.5
    assert isinstance(model.optimizer(name, chosen.learning_rate), tf.train.Optimizer)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ("--epochs 0", "--epochs: '0' instead of a whole number of at least 1"),
        ("--steps 0", "--steps: '0' instead of a whole number"),
        ("--batch-size -3", "--batch-size: '-3' instead of a whole number"),
        ("--batch-size many", "--batch-size: 'many' instead of a whole number"),
        ("--dim 0", "--dim: '0' instead of a whole number"),
        ("--seed -1", "--seed: '-1' instead of a whole number from 0 to 2147483647"),
        ("--save-steps 0", "--save-steps: '0' instead of a whole number of at least 1"),
        ("--learning-rate 0", "--learning-rate: '0' instead of a number above 0"),
        ("--learning-rate nan", "--learning-rate: 'nan' instead of a number above 0"),
        ("--optimizer newton", "--optimizer: invalid choice: 'newton'"),
        ("--batch 3", "unrecognized arguments: --batch 3"),
        ("--data-dir /nowhere", "no adult.data and no adult.test in /nowhere/census-income"),
    ],
)
def test_a_bad_value_is_one_line_from_rank_0_and_exit_code_2_everywhere(
    capsys, arguments, complaint
):
    for rank in (0, 1):
        with pytest.raises(SystemExit) as end:
            options.parse(arguments.split(), rank)
        assert end.value.code == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        if rank:
            assert printed.err == ""
        else:
            assert complaint in printed.err and printed.err.count("\n") == 1


def test_the_data_folder_comes_from_the_option_before_the_variable(tmp_path, monkeypatch):
    for name in ("given", "set"):
        census_files.with_header(tmp_path / name / "census-income")
    monkeypatch.setenv("COLLECTIVE_DATA_DIR", str(tmp_path / "set"))
    assert options.parse([]).folder == tmp_path / "set" / "census-income"
    assert (
        options.parse(["--data-dir", str(tmp_path / "given")]).folder
        == tmp_path / "given" / "census-income"
    )
    assert options.parse(["--click-log"]).folder is None


@pytest.mark.parametrize("ranks", range(1, 9))
def test_a_batch_that_the_ranks_do_not_divide_names_the_nearest_that_they_do(capsys, ranks):
    for batch in range(1, 40):
        if batch % ranks == 0:
            options.check_batch_size(batch, 0, ranks)
            continue
        with pytest.raises(SystemExit) as end:
            options.check_batch_size(batch, 0, ranks)
        assert end.value.code == 2
        named = int(capsys.readouterr().err.split("nearest that they do is ")[1].split()[0])
        assert named % ranks == 0 and named > 0
        assert abs(named - batch) == min(abs(other - batch) for other in range(ranks, 80, ranks))


def test_a_batch_of_more_than_all_rows_is_an_error(capsys):
    options.check_rows(100, 100, 0)
    with pytest.raises(SystemExit):
        options.check_rows(101, 100, 0)
    assert "--batch-size 101 is more than the 100 training rows" in capsys.readouterr().err


def test_an_export_needs_a_checkpoint(capsys):
    options.check_export(options.parse(["--export-dir", "x", "--checkpoint-dir", "y"]), 0)
    options.check_export(options.parse([]), 0)
    with pytest.raises(SystemExit):
        options.check_export(options.parse(["--export-dir", "x"]), 0)
    assert (
        "--export-dir x exports the last checkpoint, and without --checkpoint-dir there is none"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("terminal", ["0", "1"])
def test_progress_is_a_bar_where_the_launcher_says_terminal_else_ten_lines(
    capsys, monkeypatch, terminal
):
    monkeypatch.setenv("COLLECTIVE_TERMINAL", terminal)
    for rank in (0, 1):
        with progress.Progress(steps=25, batch=4, rank=rank) as shown:
            for _ in range(25):
                shown.step(0.5)
        printed = capsys.readouterr()
        assert printed.out == ""
        if rank:
            assert printed.err == ""
        elif terminal == "1":
            assert "\r" in printed.err and "25/25 steps" in printed.err
        else:
            lines = printed.err.splitlines()
            assert len(lines) == 10 and "\r" not in printed.err
            assert lines[0].startswith("step 3/25") and lines[-1].startswith("step 25/25")
            assert all("samples/s" in line and "loss 0.5000 (rank 0)" in line for line in lines)
