"""Ranks of one host train without Horovod, with the same numbers; who needs it is told."""

import os

import pytest

from tests.jobs import pool

pytestmark = pytest.mark.matrix


@pytest.fixture
def without_horovod(tmp_path):
    """Gives the environment of a Python in which Horovod can't be imported."""
    package = tmp_path / "path" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'horovod'\", name='horovod')"
    )
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join([str(package.parent), *inherited])}


def launch(ranks, script, environment, folder):
    return pool.launch(
        *("-np", ranks, "--device", "cpu", "--tee", "none", "--log-dir", folder),
        script,
        environment=environment,
        pool=False,
    )


def test_training_gives_the_same_numbers(without_horovod, tmp_path):
    printed = []
    for name, environment in (("with", {}), ("without", without_horovod)):
        folder = tmp_path / name
        done = launch(2, "tests/jobs/deterministic_training.py", environment, folder)
        assert done.returncode == 0, done.stdout
        printed.append([(folder / f"rank.{rank}" / "stdout").read_text() for rank in range(2)])
    assert printed[0] == printed[1] and all(printed[0])


@pytest.mark.parametrize(
    "script, environment, words",
    [
        (
            "import horovod.tensorflow as hvd",
            {},
            "Horovod isn't built for this TensorFlow: `collective build-horovod`, or run a script of",
        ),
        (
            "from collective import CollectiveStrategy; CollectiveStrategy()",
            {"COLLECTIVE_CARRIER": "horovod"},
            "COLLECTIVE_CARRIER=horovod asks for Horovod, which isn't installed (No module named",
        ),
    ],
    ids=["import", "carrier"],
)
def test_who_needs_it_is_told(without_horovod, tmp_path, script, environment, words):
    file = tmp_path / "train.py"
    file.write_text(script)
    done = launch(2, file, {**without_horovod, **environment}, tmp_path / "logs")
    assert done.returncode == 1
    assert words in done.stdout and "collective build-horovod" in done.stdout
