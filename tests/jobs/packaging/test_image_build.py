"""The CPU image, built command by command in a clean Debian, trains as its containers would.

Docker is not needed: the stages of docker/Dockerfile are folders, and a container is a command in
namespaces of its own (`tests/image`). It takes a quarter of an hour on two cores, most of it for
Horovod.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image import debian, dockerfile
from tests.image.build_context import BuildContext
from tests.image.image_build import Image, ImageBuild

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]

RANK_SCRIPT = """
import os, sys
import horovod.tensorflow as hvd
import tensorflow.compat.v1 as tf
from collective import CollectiveStrategy

strategy = CollectiveStrategy()
total = hvd.allreduce(tf.constant(1.0 + strategy.rank()), op=hvd.Sum).numpy()
if strategy.rank() == 0:
    with open('/out/result', 'w') as file:
        print(int(total), strategy.world_size(), os.getuid(), sys.argv[1], file=file)
"""


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    reason = debian.missing_for_builds()
    if reason:
        pytest.skip(f"images can't be built in folders here: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="collective-image-"))
    try:
        build = ImageBuild(
            dockerfile.read((ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")),
            BuildContext(ROOT),
            folder,
            debian.make_root,
            debian.this_machine(),
        )
        yield build.stage("cpu")
    finally:
        shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def new_container(image: Image) -> None:
    """Empties the folders that programs write to: each container starts as the image is."""
    for name in ("home/collective", "out", "tmp", "work"):
        for path in (image.root / name).iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def run(image: Image, *arguments: str, user: str = "", expected: int = 0) -> str:
    """Returns what a container prints."""
    finished = subprocess.run(
        image.run_command(*arguments, user=user),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert finished.returncode == expected, finished.stdout
    return finished.stdout


def write(image: Image, name: str, text: str) -> None:
    """Puts a script where a container finds what is mounted into it."""
    (image.root / "work" / name).write_text(text)


@pytest.mark.parametrize("user", ["", "54321:54321"], ids=["own", "another"])
def test_the_census_example_trains_without_arguments(image: Image, user: str):
    printed = run(image, user=user)
    assert "on 2 ranks" in printed
    assert "test AUC 0." in printed


def test_a_script_is_launched_on_several_ranks_by_any_user(image: Image):
    write(image, "train.py", RANK_SCRIPT)
    run(image, "-np", "3", "train.py", "word", user="54321:54321")
    assert (image.root / "out" / "result").read_text() == "6 3 54321 word\n"


def test_the_exit_code_is_the_ranks(image: Image):
    write(image, "fails.py", "import sys; sys.exit(7)")
    assert "exit code" in run(image, "-np", "2", "fails.py", expected=7)


def test_a_stop_reaches_the_ranks(image: Image):
    """TERM to process 1, as `docker stop` sends it."""
    write(
        image,
        "waits.py",
        "import os, pathlib, time\npathlib.Path('/out/started').touch()\ntime.sleep(600)\n",
    )
    started = image.root / "out" / "started"
    container = subprocess.Popen(image.run_command("waits.py"), stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not started.exists():
            assert time.monotonic() < deadline and container.poll() is None
            time.sleep(0.1)
        children = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text()
        (process_1,) = children.split()
        assert Path(f"/proc/{process_1}/comm").read_text().strip() == "tini"
        stopped = time.monotonic()
        subprocess.run(["kill", "-TERM", process_1], check=True)
        assert container.wait(timeout=60) == 128 + signal.SIGTERM
        assert time.monotonic() - stopped < 10  # what Docker allows before it kills
    finally:
        container.kill()
        container.wait()


def test_programs_of_the_image_run_as_they_are(image: Image):
    assert run(image, "bash", "-c", "id -u; pwd").split() == ["1000", "/work"]
    assert run(image, "tensorboard", "--version_tb").strip()
    assert "usage" in run(image, "python", "-m", "collective.checkpoint", "--help")


def test_the_image_has_all_that_training_needs_and_no_more(image: Image):
    assert "Training on the CPU can start." in run(image, "--check")
    program = """
import importlib.util, shutil
from collective.ops import native_library
assert native_library.library() is not None
for name in ('mypy', 'pytest', 'hypothesis', 'cmake', 'ruff'):
    assert importlib.util.find_spec(name) is None, name
for name in ('g++', 'gcc', 'make', 'cmake', 'nvcc'):
    assert shutil.which(name) is None, name
"""
    run(image, "python", "-c", program)
    assert not (image.root / "etc" / "pip.conf").exists()


def test_a_job_that_makes_progress_is_healthy(image: Image):
    write(
        image,
        "healthy.py",
        "import os, subprocess, sys\n"
        "sys.exit(subprocess.run([sys.executable, '/opt/collective/docker/health_check.py'])"
        ".returncode)\n",
    )
    run(image, "-np", "2", "healthy.py")
