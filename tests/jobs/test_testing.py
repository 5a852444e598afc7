"""`collective.testing` runs functions and tests on ranks, and says what went wrong on which."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from collective import testing

ROOT = Path(__file__).resolve().parents[2]
IDS = np.arange(24) * 7 % 10


def train(strategy_of=None, steps=3):
    """Trains a table on all ranks' parts of a batch; returns (rank, size, its rows)."""
    import contextlib

    import tensorflow.compat.v1 as tf

    import collective

    plain = strategy_of == "plain"
    strategy = None if plain else collective.CollectiveStrategy()
    rank, size = (0, 1) if plain else (strategy.rank(), strategy.world_size())
    scope = contextlib.nullcontext() if plain else strategy.scope(plan="quiet")
    tables = contextlib.nullcontext() if plain else strategy.embedding_scope()
    with scope, tf.Graph().as_default():
        with tables:
            table = tf.get_variable("t", [10, 2], initializer=tf.ones_initializer())
        rows = tf.nn.embedding_lookup(table, tf.constant(IDS[rank::size]))
        loss = tf.reduce_mean(tf.square(tf.reduce_sum(rows, 1) - 0.5))
        op = tf.train.AdagradOptimizer(0.1).minimize(loss)
        every = tf.nn.embedding_lookup(table, tf.range(10))
        with tf.train.MonitoredTrainingSession() as session:
            for _ in range(steps):
                session.run(op)
            return rank, size, session.run(every)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_model_on_two_ranks_has_the_numbers_of_plain_tensorflow():
    found = testing.run(train, 2, steps=4)
    ((_, _, expected),) = testing.run(train, 1, "plain", steps=4)
    assert [(rank, size) for rank, size, _ in found] == [(0, 2), (1, 2)]
    for _, _, rows in found:
        np.testing.assert_allclose(rows, expected, rtol=1e-5)


def place():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ.get("GREETING")


def test_what_is_local_to_a_test_and_its_variables_are_sent(tmp_path):
    made = {"x": np.arange(3)}

    def local(path, factor=1):
        (path / f"rank{os.environ['RANK']}").touch()
        return made["x"].sum() * factor, place()

    found = testing.run(local, 2, tmp_path, factor=5, environment={"GREETING": "hello"})
    assert found == [(15, (0, 2, "hello")), (15, (1, 2, "hello"))]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]


def test_a_failure_of_one_rank_has_its_traceback():
    def fails():
        print("rank", os.environ["RANK"], "was here")
        time.sleep(0 if os.environ["RANK"] == "1" else 20)
        assert os.environ["RANK"] == "0", "boom"

    began = time.monotonic()
    with pytest.raises(testing.RanksFailed, match="ended with exit code 1") as raised:
        testing.run(fails, 2)
    assert time.monotonic() - began < 19  # the other rank was ended
    assert [*raised.value.errors] == [1]
    assert "AssertionError: boom" in raised.value.errors[1] and "in fails" in str(raised.value)
    assert "[1] rank 1 was here" in raised.value.output


def test_a_rank_that_dies_without_a_word():
    def dies():
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(20)

    with pytest.raises(testing.RanksFailed, match="root cause: rank 1 of 2") as raised:
        testing.run(dies, 2)
    assert raised.value.errors == {}


@pytest.mark.slow
def test_a_job_that_takes_too_long_is_ended(tmp_path):
    def hangs(path):
        (path / os.environ["RANK"]).write_text(str(os.getpid()))
        time.sleep(500)

    began = time.monotonic()
    with pytest.raises(testing.RanksFailed, match="the job took more than 4 s"):
        testing.run(hangs, 2, tmp_path, timeout=4)
    assert time.monotonic() - began < 40
    for path in tmp_path.iterdir():
        assert not os.path.exists(f"/proc/{path.read_text()}")


@pytest.mark.parametrize("ranks", [0, -1, 1.5, True, "2"])
def test_numbers_of_ranks_that_there_can_t_be(ranks):
    with pytest.raises(ValueError, match="it is a whole number from 1"):
        testing.run(place, ranks)


def test_what_can_t_be_sent_is_named():
    with pytest.raises(TypeError, match="place or one of its arguments can't be sent to the ranks"):
        testing.run(place, 1, threading.Lock())
    with pytest.raises(ValueError, match="on_ranks.. has no number of ranks"):
        testing.on_ranks()


CASES = """
import os, pytest
from collective import testing
from helper import SIZE

@pytest.fixture
def number():
    return 7

@testing.on_ranks(1, 2)
def test_passes(tmp_path, number):
    assert number == 7 and tmp_path.is_dir()

@testing.on_ranks(2)
def test_is_told(ranks):
    assert ranks == SIZE == int(os.environ["WORLD_SIZE"])

@testing.on_ranks(2)
def test_fails(number):
    values = [number, int(os.environ["RANK"])]
    assert values == [7, 0]

@testing.on_ranks(1)
def test_skips():
    pytest.skip("not here")
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_pytest_runs_tests_on_ranks(tmp_path):
    """With helpers next to the test, as pytest finds them; asserts are explained."""
    (tmp_path / "helper.py").write_text("SIZE = 2\n")
    (tmp_path / "test_user.py").write_text(CASES)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-rs", "test_user.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    outcomes = dict(re.findall(r"::(test_\w+\[\d\]) (\w+)", done.stdout))
    assert outcomes == {
        "test_passes[1]": "PASSED",
        "test_passes[2]": "PASSED",
        "test_is_told[2]": "PASSED",
        "test_fails[2]": "FAILED",
        "test_skips[1]": "SKIPPED",
    }, done.stdout
    assert "--- rank 1 ---" in done.stdout and "[7, 1] == [7, 0]" in done.stdout
    assert "--- rank 0 ---" not in done.stdout and "not here" in done.stdout
