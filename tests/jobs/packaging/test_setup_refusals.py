"""One sentence names all that a machine lacks, and how to install it, before any work is done."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from scratch_checkout import EVERY_STEP, ROOT, Checkout

NEEDED = "Python 3.13, 3.12, 3.11, 3.10 for TensorFlow 2.21"
BROKEN_SHIM = '#!/usr/bin/env bash\necho "pyenv: python3.11: command not found" >&2\nexit 127\n'


def refused(checkout: Checkout, **environment: str) -> str:
    """Returns the sentence, after a look that nothing was made."""
    printed = checkout.setup(expected=2, **environment)
    assert len(printed.splitlines()) == 1, printed
    assert checkout.calls() == []
    assert not (checkout.root / ".venv").exists()
    return printed.strip()


def packages(checkout: Checkout) -> list[str]:
    return (checkout.root / ".venv" / ".setup" / "packages.txt").read_text().split()


def chosen(checkout: Checkout, **environment: str) -> str:
    printed = checkout.setup(**environment)
    assert checkout.calls() == EVERY_STEP
    return printed.split("a virtual environment of ")[1].split(")")[0] + ")"


def test_the_newest_supported_python_is_used(checkout: Checkout):
    for version in ("3.9.18", "3.10.13", "3.14.1"):
        path = checkout.python(f"python{version.rpartition('.')[0]}", version)
    assert chosen(checkout) == f"Python 3.10.13 ({path.with_name('python3.10')})"
    assert "tensorflow==2.21.0" in packages(checkout)


def test_the_newest_tensorflow_that_a_python_here_has_is_used(checkout: Checkout):
    path = checkout.python("python3.9", "3.9.18")
    assert chosen(checkout) == f"Python 3.9.18 ({path})"
    assert "tensorflow==2.15.1" in packages(checkout)


def test_the_tensorflow_can_be_chosen(checkout: Checkout):
    for version in ("3.10.13", "3.11.7", "3.13.1"):
        path = checkout.python(f"python{version.rpartition('.')[0]}", version)
    asked = chosen(checkout, TENSORFLOW="2.15")
    assert asked == f"Python 3.11.7 ({path.with_name('python3.11')})"
    assert "tensorflow==2.15.1" in packages(checkout)


def test_a_tensorflow_that_is_not_supported(checkout: Checkout):
    checkout.python("python3.11", "3.11.7")
    assert refused(checkout, TENSORFLOW="2.14").startswith(
        "setup: TENSORFLOW=2.14 is none of 2.21, 2.15: name one of these, or leave"
    )


@pytest.mark.parametrize("name", ["python3", "python"])
def test_a_python_without_its_version_in_its_name_is_found(checkout: Checkout, name: str):
    path = checkout.python(name, "3.9.2")
    assert chosen(checkout) == f"Python 3.9.2 ({path})"


def test_a_shim_that_does_not_run_and_an_incomplete_python_are_passed_over(checkout: Checkout):
    checkout.program("python3.11", BROKEN_SHIM)
    checkout.python("python3", "3.11.2", missing="venv,ensurepip")
    checkout.python("python3.10", "3.10.2", missing="ssl")
    path = checkout.python("python3.9", "3.9.18")
    assert chosen(checkout) == f"Python 3.9.18 ({path})"


def test_a_version_that_only_pyenv_has_is_found(checkout: Checkout, tmp_path: Path):
    checkout.program("python3.11", BROKEN_SHIM)
    checkout.python("python", "3.11.2", folder=tmp_path / "pyenv" / "versions" / "3.11.2" / "bin")
    newest = checkout.python(
        "python", "3.11.10", folder=tmp_path / "pyenv" / "versions" / "3.11.10" / "bin"
    )
    assert chosen(checkout) == f"Python 3.11.10 ({newest})"


def test_a_shim_that_is_asked_for_by_name_stands_for_its_version(
    checkout: Checkout, tmp_path: Path
):
    checkout.python("python3.11", "3.11.7")
    checkout.program("python3.10", BROKEN_SHIM)
    other = checkout.python(
        "python", "3.10.13", folder=tmp_path / "pyenv" / "versions" / "3.10.13" / "bin"
    )
    assert chosen(checkout, PYTHON="python3.10") == f"Python 3.10.13 ({other})"


def test_no_supported_python(checkout: Checkout):
    checkout.python("python3", "3.14.1", missing="ensurepip")
    checkout.python("python", "2.7.18")
    assert refused(checkout) == (
        f"setup: missing: one of {NEEDED} (there is only 3.14.1, 2.7.18) or what "
        "fetches it (uv, conda, python3 with venv). To install: apt-get install python3 "
        "python3-venv; or use the image, which has all that is needed: make image"
    )


def test_no_venv_module(checkout: Checkout):
    path = checkout.python("python3.11", "3.11.2", missing="ensurepip")
    assert refused(checkout) == (
        f"setup: missing: the venv module of {path}. To install: apt-get install python3.11-venv"
    )


@pytest.mark.parametrize("program", ["g++", "make"])
def test_no_compiler(checkout: Checkout, program: str):
    checkout.python("python3.11", "3.11.7")
    (checkout.programs / program).unlink()
    assert refused(checkout) == f"setup: missing: {program}. To install: apt-get install {program}"


def test_a_compiler_that_does_not_compile(checkout: Checkout):
    checkout.python("python3.11", "3.11.7")
    path = checkout.program("g++", "#!/usr/bin/env bash\nexit 1\n")
    assert refused(checkout) == (
        f"setup: missing: a g++ that compiles C++17 ({path} does not). "
        f"To install: apt-get install g++"
    )


def test_all_that_is_missing_is_said_at_once(checkout: Checkout):
    (checkout.programs / "g++").unlink()
    assert refused(checkout) == (
        f"setup: missing: one of {NEEDED} or what fetches it (uv, conda, python3 with "
        "venv), g++. To install: apt-get install python3 python3-venv g++; or use the image, which "
        "has all that is needed: make image"
    )


@pytest.mark.parametrize(
    "name, version, sentence",
    [
        (
            "python2",
            "2.7.18",
            "PYTHON=python2 is Python 2.7.18, but TensorFlow 2.21 needs one of Python 3.13, 3.12, "
            "3.11, 3.10, and TensorFlow 2.15 needs one of Python 3.11, 3.10, 3.9: ",
        ),
        (
            "python3.14",
            "3.14.1",
            "PYTHON=python3.14 is Python 3.14.1, but TensorFlow 2.21 needs one of",
        ),
    ],
)
def test_an_unsupported_python_is_not_replaced_by_another(
    checkout: Checkout, name: str, version: str, sentence: str
):
    checkout.python("python3.11", "3.11.7")
    checkout.python(name, version)
    printed = refused(checkout, PYTHON=name)
    assert sentence in printed and "unset to have one looked for, and else fetched" in printed


def test_a_python_without_the_tensorflow_that_is_asked_for(checkout: Checkout):
    checkout.python("python3.12", "3.12.1")
    assert (
        "PYTHON=python3.12 is Python 3.12.1, but TensorFlow 2.15 needs one of Python 3.11, 3.10, "
        "3.9: leave PYTHON unset"
    ) in refused(checkout, PYTHON="python3.12", TENSORFLOW="2.15")


def test_a_python_that_is_not_there_or_does_not_run(checkout: Checkout):
    checkout.program("python3.11", BROKEN_SHIM)
    assert "PYTHON=python4 is no program here" in refused(checkout, PYTHON="python4")
    assert "does not run" in refused(checkout, PYTHON="python3.11")


def test_a_python_that_is_asked_for_must_be_complete(checkout: Checkout):
    checkout.python("python3.11", "3.11.7")
    path = checkout.python("python3.9", "3.9.2", missing="venv,ensurepip")
    printed = refused(checkout, PYTHON=str(path))
    assert printed.endswith(
        f"missing: the venv module of {path}. To install: apt-get install python3.9-venv"
    )


def test_gpu_without_cuda(checkout: Checkout, tmp_path: Path):
    checkout.python("python3.11", "3.11.7")
    printed = refused(checkout, GPU="1", HOROVOD_CUDA_HOME=str(tmp_path))
    assert (
        f"missing: CUDA 12's compiler ({tmp_path}/bin/nvcc is not there" in printed
        and "cuda-toolkit-12-2" in printed
    )
    assert "GPU=yes is neither 1" in refused(checkout, GPU="yes")


def test_a_compiler_that_is_too_new_for_nvcc(checkout: Checkout, tmp_path: Path):
    """nvcc would refuse it minutes later, in the middle of Horovod's build."""
    checkout.python("python3.11", "3.11.7")
    checkout.program("nvcc", "#!/bin/sh\necho release 12.2\n", tmp_path / "cuda" / "bin")
    new = checkout.program("g++-13", "#!/bin/sh\necho 13.2.0\n")
    printed = refused(checkout, GPU="1", HOROVOD_CUDA_HOME=str(tmp_path / "cuda"), CXX="g++-13")
    assert (
        f"missing: g++ 12 or older, which is what nvcc 12.2 takes ({new} is 13.2.0; CXX= names "
        "another). To install: apt-get install g++-12, then CXX=g++-12"
    ) in printed


@pytest.mark.parametrize("folder", ["/tmp/venv", "../venv", ".venvs/../../venv"])
def test_an_environment_outside_of_the_checkout(checkout: Checkout, folder: str):
    checkout.python("python3.11", "3.11.7")
    assert f"VENV={folder} is no folder in this checkout" in refused(checkout, VENV=folder)


def test_an_unknown_option(checkout: Checkout):
    checkout.python("python3.11", "3.11.7")
    printed = checkout.setup("--silent", expected=2)
    assert printed == (
        "setup: --silent is no option: there are --quiet, --without-horovod, --dependencies and "
        "--versions\n"
    )
    assert checkout.calls() == []


def test_ci_fails_without_the_data(checkout: Checkout, clean_environment: None):
    (checkout.root / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", checkout.root / ".ci")
    finished = subprocess.run(
        [checkout.root / ".ci" / "run"],
        env={**checkout.environment, "CI": "true"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 1
    assert finished.stderr.startswith(".ci/run: COLLECTIVE_DATA_DIR is")
    assert "no folder" in finished.stderr


def test_make_lists_its_targets():
    printed = subprocess.run(["make"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    targets = (
        "help",
        "setup",
        "train",
        "test",
        "test-all",
        "test-versions",
        "wheel",
        "lint",
        "clean",
    )
    for target in targets:
        assert f"\n  {target} " in printed
