"""Set-up repeats a step only if its ingredients have changed or it was cut short."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from scratch_checkout import EVERY_STEP, Checkout

PINS = "tools/pins/tensorflow2.21/python3.11.txt"


def test_a_second_call_repeats_nothing(ready: Checkout):
    assert "up to date (TensorFlow 2.21, Python 3.11, horovod 0.28.1, GPU=0)" in ready.setup()
    assert ready.setup("--quiet") == ""
    assert ready.calls() == []


def test_each_step_is_named_with_its_time(checkout: Checkout):
    checkout.python("python3.11", "3.11.7")
    printed = checkout.setup()
    for word in (
        "a virtual environment of Python 3.11.7",
        "packages: tensorflow==2.21.0",
        "horovod==0.28.1, built",
        "this package",
    ):
        assert word in printed
    assert printed.count("    took ") == len(EVERY_STEP)


def test_type_checkers_find_the_package_and_no_other_folder_of_the_checkout(ready: Checkout):
    """They follow folders on the path (tests/unit/packaging/test_types.py), but no import hook."""
    environment = ready.root / ".venv"
    (path_file,) = environment.glob("lib/python3.11/site-packages/*.pth")
    (package,) = Path(path_file.read_text().rstrip("\n")).iterdir()
    assert package.name == "collective"
    assert os.readlink(package) == str(ready.root / "collective")


@pytest.mark.parametrize(
    "file, old, new, steps",
    [
        (PINS, "ruff==", "ruff==9.", ["packages"]),
        (PINS, "tensorflow==2.21.0", "tensorflow==2.21.1", ["packages", "package", "horovod"]),
        (PINS, "horovod==0.28.1", "horovod==0.28.2", ["packages", "horovod"]),
        ("tools/pins/tensorflow2.21/python3.10.txt", "ruff==", "ruff==9.", []),
        ("tools/pins/tensorflow2.15/python3.11.txt", "ruff==", "ruff==9.", []),
        ("tools/pins/tensorflow2.21/gpu.txt", "nvidia-ml-py==", "nvidia-ml-py==9.", []),
        ("tools/setup.sh", "# Makes .venv", "# Fills .venv", []),
        ("collective/horovod_source.py", "EDITS", "EDITS ", ["horovod"]),
        ("pyproject.toml", "[tool.mypy]", "[tool.mypy]  # types", []),
        ("pyproject.toml", 'name = "collective-strategy"', 'name = "another"', ["package"]),
        ("ops/native/keymap.cc", "extern", "extern ", ["package"]),
        ("ops/native/keymap.h", "class KeyMap", "class  KeyMap", ["package"]),
        ("ops/native/hear.cc", "class HearOp", "class  HearOp", ["package"]),
    ],
)
def test_only_what_depends_on_a_change_is_repeated(
    ready: Checkout, file: str, old: str, new: str, steps: list[str]
):
    ready.edit(file, lambda text: text.replace(old, new))
    ready.setup()
    assert ready.calls() == steps
    ready.setup()
    assert ready.calls() == []


@pytest.mark.parametrize(
    "step, repeated",
    [
        ("environment", EVERY_STEP),
        ("packages", EVERY_STEP),
        ("package", ["package", "horovod"]),
        ("horovod", ["horovod"]),
    ],
)
def test_a_step_that_fails_names_its_log_and_is_resumed(
    checkout: Checkout, step: str, repeated: list[str]
):
    checkout.python("python3.11", "3.11.7")
    printed = checkout.setup(expected=1, FAIL=step)
    log = checkout.root / ".venv" / ".setup" / f"{step}.log"
    assert f":fatal error: {step} is broken" in printed
    assert f"all of its output is in {log}" in printed
    assert f"{step} is broken" in log.read_text()
    # Errors and the end are on one screen, in lines of a readable length, without commands.
    assert "c++" not in printed and "g++" not in printed and "x.cc:20: note: 000" in printed
    assert len(printed) < 4500 and max(map(len, printed.splitlines())) < 250
    checkout.calls()
    checkout.setup()
    assert checkout.calls() == repeated
    checkout.setup()
    assert checkout.calls() == []


@pytest.mark.parametrize(
    "step, repeated",
    [
        ("environment", EVERY_STEP),
        ("packages", EVERY_STEP),
        ("horovod", ["horovod"]),
    ],
)
def test_a_set_up_that_is_killed_is_resumed(checkout: Checkout, step: str, repeated: list[str]):
    """Makes .venv again where a package may be half installed; Horovod's build installs none."""
    checkout.python("python3.11", "3.11.7")
    process = checkout.start(HANG=step)
    checkout.wait_for_call(step)
    leftover = checkout.root / ".venv" / "leftover"
    leftover.touch()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    checkout.calls()
    checkout.setup()
    assert checkout.calls() == repeated
    assert leftover.exists() == (repeated != EVERY_STEP)
    checkout.setup()
    assert checkout.calls() == []


@pytest.mark.parametrize(
    "step, repeated",
    [("packages", EVERY_STEP), ("package", ["package", "horovod"]), ("horovod", ["horovod"])],
)
def test_a_set_up_that_is_interrupted_says_so_in_a_line(
    checkout: Checkout, step: str, repeated: list[str]
):
    """Ctrl-C reaches the whole group; pip ends like one that fails."""
    checkout.python("python3.11", "3.11.7")
    process = checkout.start(HANG=step)
    checkout.wait_for_call(step)
    os.killpg(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert printed.splitlines()[-1] == "setup: interrupted. The next call does what is left"
    assert "failed" not in printed and len(printed) < 1000
    checkout.calls()
    checkout.setup()
    assert checkout.calls() == repeated


def test_a_set_up_that_was_killed_while_it_removed_an_old_environment_is_resumed(ready: Checkout):
    (ready.root / ".venv" / ".setup" / "unfinished").touch()
    shutil.rmtree(ready.root / ".venv" / "bin")
    assert "did not finish: starting again" in ready.setup()
    assert ready.calls() == EVERY_STEP


def test_two_at_the_same_time_take_turns(checkout: Checkout):
    checkout.python("python3.11", "3.11.7")
    first = checkout.start()
    checkout.wait_for_call("environment")
    second = checkout.start()
    printed = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], printed
    assert checkout.calls() == EVERY_STEP


def test_an_environment_in_another_folder_is_apart(ready: Checkout):
    ready.python("python3.10", "3.10.13")
    other = {"VENV": ".venvs/3.10", "PYTHON": "python3.10"}
    assert ".venvs/3.10 has TensorFlow 2.21, Python 3.10, horovod 0.28.1, GPU=0" in ready.setup(
        **other
    )
    assert ready.calls() == EVERY_STEP
    assert ".venv is up to date (TensorFlow 2.21, Python 3.11," in ready.setup()
    assert ".venvs/3.10 is up to date (TensorFlow 2.21, Python 3.10," in ready.setup(
        VENV=".venvs/3.10"
    )
    assert ready.calls() == []


def test_set_ups_of_two_environments_take_turns(ready: Checkout):
    """Both compile libraries into the checkout, and write its metadata."""
    first = ready.start(HANG="environment", VENV=".venvs/3.11")
    ready.wait_for_call("environment")
    second = ready.start()
    assert second.stdout is not None
    assert "another set-up is at work here" in second.stdout.readline()
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=60)
    assert "up to date" in second.communicate(timeout=60)[0]


def test_one_waits_for_what_a_killed_one_left_running(checkout: Checkout):
    """pip goes on when only the script is killed; nobody may remove what it is writing to."""
    checkout.python("python3.11", "3.11.7")
    first = checkout.start(HANG="packages")
    checkout.wait_for_call("packages")
    first.kill()
    first.wait()
    second = checkout.start()
    assert second.stdout is not None
    assert "another set-up is at work here" in second.stdout.readline()
    os.killpg(first.pid, signal.SIGKILL)
    second.communicate(timeout=60)
    assert second.returncode == 0
    assert checkout.calls() == ["environment", "packages", *EVERY_STEP]


def test_python_and_gpu_are_remembered(ready: Checkout):
    ready.python("python3.10", "3.10.13")
    ready.program("nvcc", "#!/usr/bin/env bash\necho release 12.2\n", ready.root / "cuda" / "bin")
    asked = {"GPU": "1", "HOROVOD_NCCL_HOME": "/", "HOROVOD_CUDA_HOME": str(ready.root / "cuda")}
    assert "Python 3.11, horovod 0.28.1, GPU=1" in ready.setup(**asked)
    assert ready.calls() == EVERY_STEP
    assert "Python 3.10, horovod 0.28.1, GPU=1" in ready.setup(PYTHON="python3.10", **asked)
    assert ready.calls() == EVERY_STEP
    assert "cupy-cuda12x==" in (ready.root / ".venv" / ".setup" / "packages.txt").read_text()
    assert "up to date (TensorFlow 2.21, Python 3.10, horovod 0.28.1, GPU=1)" in ready.setup()
    assert ready.calls() == []
    assert "Python 3.11, horovod 0.28.1, GPU=0" in ready.setup(PYTHON="python3.11", GPU="0")
    assert ready.calls() == EVERY_STEP


def test_the_tensorflow_is_remembered(ready: Checkout):
    ready.python("python3.12", "3.12.3")
    assert "TensorFlow 2.15, Python 3.11," in ready.setup(TENSORFLOW="2.15")
    assert ready.calls() == EVERY_STEP
    packages = (ready.root / ".venv" / ".setup" / "packages.txt").read_text().split()
    assert "tensorflow==2.15.1" in packages
    assert "up to date (TensorFlow 2.15, Python 3.11," in ready.setup()
    assert "up to date (TensorFlow 2.15, Python 3.11," in ready.setup(TENSORFLOW="2.15")
    assert ready.calls() == []
    assert "TensorFlow 2.21, Python 3.12," in ready.setup(TENSORFLOW="2.21")
    assert ready.calls() == EVERY_STEP


def test_a_remembered_python_gives_way_to_a_tensorflow_that_it_has_not(checkout: Checkout):
    checkout.python("python3.11", "3.11.7")
    checkout.python("python3.12", "3.12.3")
    checkout.setup(PYTHON="python3.12")
    assert "TensorFlow 2.15, Python 3.11," in checkout.setup(TENSORFLOW="2.15")
    assert checkout.calls() == EVERY_STEP * 2


def test_horovod_is_built_with_the_named_cuda_whatever_nvcc_the_path_has(ready: Checkout):
    """Horovod asks the first `nvcc` of the PATH for its architectures."""
    ready.program("nvcc", "#!/usr/bin/env bash\necho release 13.0\n")
    named = ready.program(
        "nvcc", "#!/usr/bin/env bash\necho release 12.2\n", ready.root / "cuda" / "bin"
    )
    cuda_home = str(ready.root / "cuda")
    ready.setup(GPU="1", HOROVOD_NCCL_HOME="/", HOROVOD_CUDA_HOME=cuda_home)
    log = (ready.root / ".venv" / ".setup" / "horovod.log").read_text().splitlines()
    assert f"nvcc: {named}" in log
    assert "HOROVOD_BUILD_CUDA_CC_LIST=70,80,90" in log[0]


def test_dependencies_alone_need_only_tools_and_the_build_of_horovod(checkout: Checkout):
    for name in ("pyproject.toml", "setup.py"):
        (checkout.root / name).unlink()
    shutil.rmtree(checkout.root / "ops")
    checkout.python("python3.11", "3.11.7")
    printed = checkout.setup("--dependencies")
    assert "No such file" not in printed
    assert checkout.calls() == ["environment", "packages", "horovod"]
    assert "up to date" in checkout.setup("--dependencies")
    assert checkout.calls() == []


def test_a_training_on_this_host_does_not_wait_for_horovod(checkout: Checkout):
    checkout.python("python3.11", "3.11.7")
    assert "make setup adds Horovod" in checkout.setup("--without-horovod")
    assert checkout.calls() == ["environment", "packages", "package"]
    assert checkout.setup("--without-horovod") == ""
    checkout.setup()
    assert checkout.calls() == ["horovod"]
    assert checkout.setup("--without-horovod") == ""
    assert checkout.calls() == []


def test_set_up_after_dependencies_alone_installs_the_package(checkout: Checkout):
    checkout.python("python3.11", "3.11.7")
    checkout.setup("--dependencies")
    checkout.calls()
    checkout.setup()
    assert checkout.calls() == ["package"]


def test_a_python_that_is_installed_later_changes_nothing(checkout: Checkout):
    checkout.python("python3.10", "3.10.13")
    checkout.setup()
    checkout.calls()
    checkout.python("python3.11", "3.11.7")
    checkout.setup()
    assert checkout.calls() == []


def test_a_python_that_is_gone_or_a_checkout_that_was_moved_means_a_new_environment(
    ready: Checkout, tmp_path: Path
):
    ready.root = ready.root.rename(tmp_path / "moved")
    ready.setup()
    assert ready.calls() == EVERY_STEP
    (ready.root / ".venv" / "bin" / "python").unlink()
    ready.setup()
    assert ready.calls() == EVERY_STEP


def test_an_environment_of_another_making_is_left_alone(checkout: Checkout):
    checkout.python("python3.11", "3.11.7")
    (checkout.root / ".venv" / "bin").mkdir(parents=True)
    assert "is not of this script's making" in checkout.setup(expected=2)
    assert checkout.calls() == []
