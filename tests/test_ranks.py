"""Launches the cases of tests/ranks once for each number of ranks: they run on every rank of one
launch.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SEED = int(os.environ.get("COLLECTIVE_TEST_SEED") or random.SystemRandom().randrange(2**31))


def launch(ranks, *arguments, seed, examples=None, timeout=1500, backend="hb", on_the_double=False):
    environment = dict(os.environ, COLLECTIVE_STRATEGY=backend)
    if examples:
        environment["COLLECTIVE_TEST_EXAMPLES"] = str(examples)
    command = [
        sys.executable,
        "-m",
        "collective.launch",
        "-np",
        str(ranks),
        "--tee",
        "0",
        "--device",
        "cpu",
        *(["-m", "tests.gpu_double"] if on_the_double else []),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--hypothesis-seed={seed}",
        # a thread ends also what hangs in C++
        "--timeout",
        "120",
        "--timeout-method",
        "thread",
        *arguments,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        timeout=timeout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
    )
    print(f"COLLECTIVE_TEST_SEED={seed}", " ".join(command), done.stdout[-12000:], sep="\n")
    return done


LONG = pytest.mark.long
EVERYTHING = ("tests/ranks",)
# What depends most on how many ranks there are: three of them take long on two cores, and one has
# little to exchange. Of the rest some, drawn by the seed.
CORE = (
    "communication",
    "tables",
    "training",
    "dynamic",
    "checkpoint",
    "evaluation",
    "grouping",
    "session_ends",
)
REST = sorted(
    {path.stem[len("test_") :] for path in (ROOT / "tests" / "ranks").glob("test_*.py")}
    - {*CORE, "random_models"}
)
SOME = tuple(
    f"tests/ranks/test_{name}.py" for name in sorted([*CORE, *random.Random(SEED).sample(REST, 3)])
)


@pytest.mark.timeout(1900)
@pytest.mark.parametrize(
    "ranks, backend, cases",
    [
        (1, "hb", SOME),
        (2, "sok", EVERYTHING),
        (3, "hb", SOME),
        *(
            pytest.param(ranks, backend, EVERYTHING, marks=LONG)
            for ranks, backend in ((1, "hb"), (1, "sok"), (2, "hb"), (3, "hb"), (3, "sok"))
        ),
    ],
)
def test_every_case_on_every_rank(ranks, backend, cases):
    done = launch(ranks, *cases, seed=SEED, examples=3, backend=backend, timeout=1800)
    assert done.returncode == 0, "the output above names the case"
    assert " passed" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks, backend", [(2, "hb"), (3, "sok")])
def test_every_case_without_grouping(monkeypatch, ranks, backend):
    """The numbers, ends and errors of lookups that have an exchange each."""
    monkeypatch.setenv("COLLECTIVE_TEST_GROUPING", "off")
    done = launch(
        ranks,
        "-m",
        "not grouped",
        *EVERYTHING,
        seed=SEED,
        examples=3,
        backend=backend,
        timeout=3500,
    )
    assert done.returncode == 0, "the output above names the case"


ON_THE_DOUBLE = (
    "training",
    "dynamic",
    "lookups",
    "grouping_hard",
    "grouping_errors",
    "accumulation",
    "checkpoint",
    "checkpoint_dynamic",
    "dynamic_columns",
    "evaluation",
    "session_ends",
    "functions",
    "estimator",
    "tables",
)


@pytest.mark.timeout(1900)
@pytest.mark.parametrize(
    "ranks, backend, cases",
    [
        (2, random.Random(SEED).choice(("hb", "sok")), ON_THE_DOUBLE[:2]),
        *(
            pytest.param(ranks, backend, ON_THE_DOUBLE, marks=LONG)
            for ranks, backend in ((1, "hb"), (2, "hb"), (3, "sok"))
        ),
    ],
)
def test_cases_with_the_double_of_a_gpu(ranks, backend, cases):
    files = [f"tests/ranks/test_{name}.py" for name in cases]
    done = launch(
        ranks,
        *files,
        seed=SEED,
        examples=2,
        backend=backend,
        timeout=1800,
        on_the_double=True,
    )
    assert done.returncode == 0, "the output above names the case"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_case_with_more_seeds(ranks, seed):
    assert launch(ranks, "tests/ranks", seed=seed, examples=100, timeout=3500).returncode == 0
