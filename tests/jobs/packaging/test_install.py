"""`pip install .` into a plain environment gives the whole library, outside of the checkout."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import sys
from pathlib import Path

import pytest
from checkout_copy import copy_checkout, run

# Long: pip installs TensorFlow twice, for the build and with the library.
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

TENSORFLOW = importlib.metadata.version("tensorflow")
PROGRAM = """
import tensorflow.compat.v1 as tf
import collective

strategy = collective.CollectiveStrategy()
with strategy.scope(), tf.Graph().as_default():
    with strategy.embedding_scope():
        user = tf.get_variable("user", [11, 4])
        item = tf.get_variable("item", [7, 4])
    keyed = collective.get_embedding_variable("keyed", 4)
    ids = tf.constant([strategy.rank(), 3, 5], tf.int64)
    rows = sum(tf.nn.embedding_lookup(table, ids) for table in (user, item, keyed))
    loss = tf.reduce_mean((rows - 1.0) ** 2)
    train_op = tf.train.AdagradOptimizer(0.1).minimize(loss)
    with tf.train.MonitoredTrainingSession("") as session:
        losses = [session.run([loss, train_op])[0] for _ in range(20)]
assert losses[-1] < losses[0] / 2, losses
print("trained with", collective.__file__)
"""


@pytest.fixture(scope="module")
def plain(package_index: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Installs a copy of the checkout as a user does; returns the environment's interpreter."""
    folder = tmp_path_factory.mktemp("plain")
    checkout = copy_checkout(folder / "checkout")
    run(sys.executable, "-m", "venv", folder / "environment", cwd=folder)
    python = folder / "environment" / "bin" / "python"
    # The newest TensorFlow by itself; this one, so that Horovod's copy fits.
    wanted = (checkout, f"tensorflow=={TENSORFLOW}")
    run(python, "-m", "pip", "install", *wanted, cwd=folder, PYTHONPATH="", PIP_CONSTRAINT="")
    shutil.rmtree(checkout)
    (folder / "train.py").write_text(PROGRAM)
    return python


@pytest.fixture(scope="module")
def horovod(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies the Horovod of this environment, built against the same TensorFlow, to a folder."""
    folder = tmp_path_factory.mktemp("horovod")
    distribution = importlib.metadata.distribution("horovod")
    for file in distribution.files or ():
        if ".." not in file.parts:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(distribution.locate_file(file), folder / file)
    return folder


def launch(python: Path, horovod: Path, *arguments: object) -> str:
    return run(
        *(python, "-m", "collective.launch", *arguments),
        cwd=python.parents[2],
        PYTHONPATH=str(horovod),
        COLLECTIVE_STRATEGY="hb",
        CUDA_VISIBLE_DEVICES="",
    )


def installed(python: Path) -> Path:
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    return packages


def test_nothing_that_is_installed_contradicts_another(plain: Path):
    run(plain, "-m", "pip", "check", cwd=plain.parents[2], PYTHONPATH="")


def test_without_horovod_data_are_prepared_and_a_check_says_what_is_missing(plain: Path):
    import subprocess

    folder = plain.parents[2]
    command = [plain.with_name("collective"), "check"]
    finished = subprocess.run(command, cwd=folder, env={"PATH": "/bin"}, capture_output=True)
    assert finished.returncode == 1 and b"missing: Horovod with Gloo" in finished.stdout
    for words in ("--help", "launch --help all", "data criteo --help", "report --help"):
        run(plain.with_name("collective"), *words.split(), cwd=folder, PYTHONPATH="")


def test_it_trains_with_the_compiled_operations(plain: Path, horovod: Path):
    printed = launch(plain, horovod, "-np", 2, "train.py")
    assert printed.count(f"trained with {installed(plain)}/collective/__init__.py") == 2
    # only the compiled operations let three tables share an exchange
    assert re.search(r" rows +.* Alltoall +1 +3 ", printed) and "missing" not in printed
    assert f"\noperations  compiled for TensorFlow {TENSORFLOW}" in launch(
        plain, horovod, "--check"
    )


def test_missing_operations_are_said_wherever_one_looks(plain: Path, horovod: Path):
    (library,) = (installed(plain) / "collective" / "ops").glob("_native*")
    aside = library.rename(library.parent / "aside")
    try:
        printed = launch(plain, horovod, "-np", 2, "train.py")
        checked = launch(plain, horovod, "--check")
    finally:
        aside.rename(library)
    why = "they were not built: run `make setup`"
    assert printed.count(f"steps are slower; {why}") == 1
    assert printed.count(f"compiled operations: missing, so every lookup is alone; {why}") == 1
    assert "\noperations  none: ImportError" in checked
    assert "\nmissing: the compiled operations" in checked


@pytest.mark.long
def test_the_command_builds_horovod(plain: Path, tmp_path: Path):
    """A build of minutes, in an environment that has newer tools than Horovod's build takes."""
    run(plain, "-m", "venv", tmp_path / "environment", cwd=tmp_path)
    python = tmp_path / "environment" / "bin" / "python"
    (installed(python) / "plain.pth").write_text(f"{installed(plain)}\n")
    run(python, "-m", "pip", "install", "--upgrade", "setuptools", cwd=tmp_path)
    run(python, "-m", "collective.build_horovod", cwd=tmp_path, PYTHONPATH="")
    assert (installed(python) / "horovod").is_dir()
    (tmp_path / "train.py").write_text(PROGRAM)
    command = (python, "-m", "collective.launch", "-np", 2, "--device", "cpu", "train.py")
    assert run(*command, cwd=tmp_path, PYTHONPATH="").count("trained with") == 2
