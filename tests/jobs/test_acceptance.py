"""The acceptance scripts, as they are, on real ranks.

They lie in the folder that the environment variable COLLECTIVE_ACCEPTANCE_DIR names.
"""

import itertools
import os
from pathlib import Path

import pytest

from tests.jobs import pool

FOLDER = os.environ.get("COLLECTIVE_ACCEPTANCE_DIR")
OPTIMIZERS = ("sgd", "momentum", "adagrad", "adam", "ftrl", "rmsprop", "adadelta")
BACKENDS = ("hb", "sok")
# Of `make test`; then `make test-matrix` comes to every optimizer, every N and both backends.
FEW = {(1, "ftrl", "hb"), (2, "adam", "sok"), (3, "adagrad", "hb")}
SAMPLE = set(zip(itertools.cycle((3, 2, 4, 2, 1, 4, 3)), OPTIMIZERS, itertools.cycle(BACKENDS)))
MATRIX = pytest.mark.matrix(always=True)
LONG = pytest.mark.long
ON_RANKS = pytest.mark.parametrize(
    "ranks, backend",
    [
        (2, "sok"),
        pytest.param(1, "hb", marks=LONG),
        pytest.param(3, "hb", marks=MATRIX),
        pytest.param(1, "sok", marks=LONG),
        pytest.param(2, "hb", marks=LONG),
        pytest.param(3, "sok", marks=LONG),
    ],
)


def script(name):
    if not FOLDER:
        if os.environ.get("CI"):
            pytest.fail(
                "COLLECTIVE_ACCEPTANCE_DIR must name the folder of the acceptance scripts "
                "where CI is set"
            )
        pytest.skip("COLLECTIVE_ACCEPTANCE_DIR is not set")
    return str(Path(FOLDER) / name)


def on_ranks(ranks, backend, command, double=False):
    injected = ("-m", "tests.gpu_double") if double else ()
    done = pool.launch(
        *("-np", ranks, "--device", "cpu", *injected, *command),
        environment={"COLLECTIVE_STRATEGY": backend, "COLLECTIVE_KERNELS": "cpu"},
    )
    assert done.returncode == 0
    return done.stdout


# What runs on a GPU, with the emulator in its place.
DOUBLE = (2, "sok")
ON_THE_DOUBLE = pytest.mark.parametrize(
    "ranks, backend",
    [
        pytest.param(ranks, backend, marks=MATRIX if (ranks, backend) == DOUBLE else LONG)
        for ranks in (1, 2, 3)
        for backend in BACKENDS
    ],
)


@ON_RANKS
def test_seed_session(ranks, backend, double=False):
    out = on_ranks(ranks, backend, [script("seed_session.py")], double)
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: seed session ok" in out


@ON_THE_DOUBLE
def test_seed_session_on_the_double_of_a_gpu(ranks, backend):
    test_seed_session(ranks, backend, double=True)


@MATRIX
@ON_RANKS
def test_seed_estimator_and_what_it_exports(ranks, backend, tmp_path, double=False):
    command = [script("seed_estimator.py"), "--out", tmp_path]
    out = on_ranks(ranks, backend, command, double)
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: seed estimator ok" in out
    # in a process that has not loaded this library
    served = pool.python(script("serve_check.py"), tmp_path, pool=False)
    assert served.returncode == 0 and "serve check ok" in served.stdout


@pytest.mark.long
@ON_THE_DOUBLE
def test_seed_estimator_on_the_double_of_a_gpu(ranks, backend, tmp_path):
    test_seed_estimator_and_what_it_exports(ranks, backend, tmp_path, double=True)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    folder = tmp_path_factory.mktemp("equivalence")

    def reference(optimizer):
        path = folder / f"{optimizer}.npz"
        if not path.exists():
            command = (script("equivalence.py"), "--optimizer", optimizer, "--reference", path)
            assert pool.python(*command).returncode == 0
        return path

    return reference


@pytest.mark.slow(always=True)
@pytest.mark.parametrize(
    "ranks, optimizer, backend",
    [
        pytest.param(*case, marks=[] if case in FEW else MATRIX if case in SAMPLE else LONG)
        for case in itertools.product((1, 2, 3, 4), OPTIMIZERS, BACKENDS)
    ],
)
def test_equivalence(ranks, optimizer, backend, references, double=False):
    reference = references(optimizer)
    command = [script("equivalence.py"), "--optimizer", optimizer, "--check", reference]
    out = on_ranks(ranks, backend, command, double)
    assert out.count("equals plain TensorFlow") == ranks


@MATRIX
def test_equivalence_where_the_planner_places_tables(references, tmp_path):
    """Some replicated, some by rows: two are in its file, the others are placed one by one."""
    file = tmp_path / "tables.yml"
    file.write_text(
        "tables:\n"
        "  sum: {rows: 50, dimension: 4, ids: 2, placement: replicated}\n"
        "  one_hot: {rows: 1009, dimension: 8, placement: replicated}\n"
    )
    command = [script("equivalence.py"), "--optimizer", "adam", "--check", references("adam")]
    done = pool.launch(
        *("-np", 2, "--device", "cpu", *command),
        environment={"COLLECTIVE_PLACEMENT": f"auto:{file}", "COLLECTIVE_KERNELS": "cpu"},
    )
    assert done.returncode == 0 and done.stdout.count("equals plain TensorFlow") == 2
    assert f"replicates 2 of 5 tables, the others are by rows; by {file}" in done.stdout


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(name, marks=[] if name == "adam" else LONG) for name in OPTIMIZERS],
)
@ON_THE_DOUBLE
def test_equivalence_on_the_double_of_a_gpu(ranks, optimizer, backend, references):
    test_equivalence(ranks, optimizer, backend, references, double=True)
