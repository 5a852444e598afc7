"""The acceptance scripts, as they are, on real ranks.

They lie in the folder that the environment variable COLLECTIVE_ACCEPTANCE_DIR names.
"""

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = os.environ.get("COLLECTIVE_ACCEPTANCE_DIR")
OPTIMIZERS = ("sgd", "momentum", "adagrad", "adam", "ftrl", "rmsprop", "adadelta")
SEED = int(os.environ.get("COLLECTIVE_TEST_SEED") or 0)
# Every optimizer once, every N and both backends, the same each time; `make test-all` has all of
# them.
SAMPLE = set(
    zip(
        random.Random(SEED).sample(OPTIMIZERS, len(OPTIMIZERS)),
        itertools.cycle((3, 2, 4, 3, 2, 4, 1)),
        itertools.cycle(("hb", "sok")),
    )
)
ON_RANKS = pytest.mark.parametrize(
    "ranks, backend",
    [
        (1, "hb"),
        (2, "sok"),
        (3, "hb"),
        *(
            pytest.param(ranks, backend, marks=pytest.mark.long)
            for ranks, backend in ((1, "sok"), (2, "hb"), (3, "sok"))
        ),
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


def run(command, timeout=240, **environment):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        timeout=timeout,
        text=True,
        env=dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", PYTHONPATH=str(ROOT), **environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
    )
    print(f"COLLECTIVE_TEST_SEED={SEED}", done.stdout[-6000:], sep="\n")
    assert done.returncode == 0
    return done.stdout


def on_ranks(ranks, backend, command, kernels="cpu"):
    return run(
        ["-m", "collective.launch", "-np", str(ranks), "--device", "cpu", *command],
        COLLECTIVE_STRATEGY=backend,
        COLLECTIVE_KERNELS=kernels,
    )


# What runs on a GPU, with NumPy in its place: some, drawn by the seed.
DOUBLE = [(random.Random(SEED).choice((1, 2, 3)), random.Random(SEED).choice(("hb", "sok")))]
ON_THE_DOUBLE = pytest.mark.parametrize(
    "ranks, backend",
    [
        pytest.param(ranks, backend, marks=[] if (ranks, backend) in DOUBLE else [pytest.mark.long])
        for ranks in (1, 2, 3)
        for backend in ("hb", "sok")
    ],
)


@ON_RANKS
def test_seed_session(ranks, backend, kernels="cpu"):
    out = on_ranks(ranks, backend, [script("seed_session.py")], kernels)
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: seed session ok" in out


@ON_THE_DOUBLE
def test_seed_session_on_the_double_of_a_gpu(ranks, backend):
    test_seed_session(ranks, backend, "double")


@ON_RANKS
def test_seed_estimator_and_what_it_exports(ranks, backend, tmp_path, kernels="cpu"):
    out = on_ranks(ranks, backend, [script("seed_estimator.py"), "--out", str(tmp_path)], kernels)
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: seed estimator ok" in out
    assert "serve check ok" in run([script("serve_check.py"), str(tmp_path)])


@ON_THE_DOUBLE
def test_seed_estimator_on_the_double_of_a_gpu(ranks, backend, tmp_path):
    test_seed_estimator_and_what_it_exports(ranks, backend, tmp_path, "double")


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("equivalence"), {}

    def reference(optimizer):
        if optimizer not in made:
            made[optimizer] = str(folder / f"{optimizer}.npz")
            run(
                [script("equivalence.py"), "--optimizer", optimizer, "--reference", made[optimizer]]
            )
        return made[optimizer]

    return reference


@pytest.mark.parametrize(
    "ranks, optimizer, backend",
    [
        pytest.param(
            ranks,
            optimizer,
            backend,
            marks=[] if (optimizer, ranks, backend) in SAMPLE else [pytest.mark.long],
        )
        for ranks in (1, 2, 3, 4)
        for optimizer in OPTIMIZERS
        for backend in ("hb", "sok")
    ],
)
def test_equivalence(ranks, optimizer, backend, references, kernels="cpu"):
    out = on_ranks(
        ranks,
        backend,
        [script("equivalence.py"), "--optimizer", optimizer, "--check", references(optimizer)],
        kernels,
    )
    assert out.count("equals plain TensorFlow") == ranks


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(
            name,
            marks=[] if name in random.Random(SEED).sample(OPTIMIZERS, 3) else [pytest.mark.long],
        )
        for name in OPTIMIZERS
    ],
)
@ON_THE_DOUBLE
def test_equivalence_on_the_double_of_a_gpu(ranks, optimizer, backend, references):
    test_equivalence(ranks, optimizer, backend, references, "double")
