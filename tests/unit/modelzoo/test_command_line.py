"""The options that both training programs have, and one clear sentence for a bad one."""

from __future__ import annotations

import pytest
import tensorflow.compat.v1 as tf

import census_income.options
import movielens.options
from common import optimizers

pytestmark = pytest.mark.usefixtures("no_data_dir", "no_sleep")
PROGRAMS = [census_income.options, movielens.options]
BAD_VALUES = [
    ("--epochs 0", "--epochs: '0' instead of a whole number of at least 1"),
    ("--steps 0", "--steps: '0' instead of a whole number"),
    ("--batch-size -3", "--batch-size: '-3' instead of a whole number"),
    ("--batch-size many", "--batch-size: 'many' instead of a whole number"),
    ("--dim 0", "--dim: '0' instead of a whole number"),
    ("--seed -1", "--seed: '-1' instead of a whole number from 0 to 2147483647"),
    ("--learning-rate 0", "--learning-rate: '0' instead of a number above 0"),
    ("--learning-rate nan", "--learning-rate: 'nan' instead of a number above 0"),
    ("--optimizer newton", "--optimizer: invalid choice: 'newton'"),
    ("--batch 3", "unrecognized arguments: --batch 3"),
]
BAD_VALUES_OF_A_PROGRAM = [
    (
        census_income.options,
        "--save-steps 0",
        "--save-steps: '0' instead of a whole number of at least 1",
    ),
    (
        census_income.options,
        "--data-dir /nowhere",
        "no adult.data and no adult.test in /nowhere/census-income",
    ),
    (
        movielens.options,
        "--ratings 3",
        "--ratings: '3' instead of a whole number of at least 10",
    ),
    (movielens.options, "--l2 -1", "--l2: '-1' instead of a number of at least 0"),
    (movielens.options, "--data-dir /nowhere", "no movie_lens/100k-ratings in /nowhere"),
]


@pytest.mark.parametrize(
    "program, arguments, complaint",
    [
        *((program, *bad_value) for program in PROGRAMS for bad_value in BAD_VALUES),
        *BAD_VALUES_OF_A_PROGRAM,
    ],
)
def test_a_bad_value_is_one_line_from_rank_0_and_exit_code_2_everywhere(
    capsys, program, arguments, complaint
):
    for rank in (0, 1):
        with pytest.raises(SystemExit) as end:
            program.parse(arguments.split(), rank)
        assert end.value.code == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        if rank:
            assert printed.err == ""
        else:
            assert complaint in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize("program", PROGRAMS)
def test_steps_override_epochs(program):
    options = program.parse(["--steps", "7", "--epochs", "3"])
    assert options.total_steps(32561) == 7


@pytest.mark.parametrize(
    "program, name", [(program, name) for program in PROGRAMS for name in program.LEARNING_RATES]
)
def test_every_optimizer_has_a_learning_rate_that_can_be_changed(program, name):
    options = program.parse(["--optimizer", name])
    assert options.learning_rate == program.LEARNING_RATES[name]
    assert program.parse(["--optimizer", name, "--learning-rate", "0.5"]).learning_rate == 0.5
    assert isinstance(optimizers.create(name, options.learning_rate), tf.train.Optimizer)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_a_batch_that_the_ranks_do_not_divide_names_the_nearest_that_they_do(capsys, ranks):
    command_line = census_income.options.parser(rank=0)
    for batch_size in range(1, 40):
        if batch_size % ranks == 0:
            command_line.check_batch_size(batch_size, ranks)
            continue
        with pytest.raises(SystemExit) as end:
            command_line.check_batch_size(batch_size, ranks)
        assert end.value.code == 2
        nearest = int(capsys.readouterr().err.split("nearest that they do is ")[1].split()[0])
        assert nearest % ranks == 0 and nearest > 0
        multiples = range(ranks, 80, ranks)
        assert abs(nearest - batch_size) == min(abs(other - batch_size) for other in multiples)


@pytest.mark.parametrize(
    "program, examples",
    [(census_income.options, "training rows"), (movielens.options, "training ratings")],
)
def test_a_batch_of_more_than_all_examples_is_an_error(capsys, program, examples):
    command_line = program.parser(rank=0)
    command_line.check_full_batch(100, 100)
    with pytest.raises(SystemExit):
        command_line.check_full_batch(101, 100)
    assert f"--batch-size 101 is more than the 100 {examples}" in capsys.readouterr().err
