"""Where the machine has no supported Python, set-up fetches one into the checkout, and says so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from scratch_checkout import CONDA, EVERY_STEP, UV, Checkout

UV_FETCHED = "cpython-3.12.11-linux-x86_64-gnu/bin/python3.12"
NEEDED = "Python 3.13, 3.12, 3.11, 3.10 for TensorFlow 2.21"


@pytest.fixture
def mirror(checkout: Checkout, tmp_path: Path) -> Path:
    checkout.python("python3.12", "3.12.11", folder=tmp_path / "mirror")
    return tmp_path / "mirror"


@pytest.fixture
def newer(checkout: Checkout) -> Path:
    """Installs a Python that no TensorFlow has, without its venv module."""
    return checkout.python("python3", "3.14.3", missing="ensurepip")


def test_uv_fetches_one_from_its_mirror(checkout: Checkout, mirror: Path, newer: Path):
    uv = checkout.program("uv", UV)
    fetched = checkout.root / ".python"
    printed = checkout.setup(UV_PYTHON_INSTALL_MIRROR=f"file://{mirror}")
    assert printed.splitlines()[0] == (
        f"setup: no {NEEDED} (there is only 3.14.3) here: {uv} fetches Python 3.12 into {fetched} "
        "(PYTHON= names one instead) ..."
    )
    assert f"a virtual environment of Python 3.12.11 ({fetched / UV_FETCHED})" in printed
    assert checkout.calls() == ["uv", *EVERY_STEP]
    checkout.setup()
    assert checkout.calls() == []


def test_it_is_found_by_later_environments(checkout: Checkout, mirror: Path):
    checkout.program("uv", UV)
    checkout.setup(UV_PYTHON_INSTALL_MIRROR=f"file://{mirror}")
    fetched = checkout.root / ".python" / UV_FETCHED
    assert f"\n2.21 3.12 {fetched}\n" in checkout.setup("--versions")
    checkout.calls()
    checkout.setup(VENV=".venvs/3.12")
    assert checkout.calls() == EVERY_STEP
    shutil.rmtree(checkout.root / ".python")
    checkout.setup(UV_PYTHON_INSTALL_MIRROR=f"file://{mirror}")
    assert checkout.calls() == []  # where nothing is due, no interpreter is looked for
    shutil.rmtree(checkout.root / ".venv" / "bin")
    checkout.setup(UV_PYTHON_INSTALL_MIRROR=f"file://{mirror}")
    assert checkout.calls() == ["uv", *EVERY_STEP]


def test_one_that_uv_has_already_fetched_for_the_user_is_used(checkout: Checkout, tmp_path: Path):
    folder = tmp_path / ".local" / "share" / "uv" / "python"
    path = checkout.python("python3.12", "3.12.11", folder=folder / Path(UV_FETCHED).parent)
    checkout.program("uv", UV)
    assert f"Python 3.12.11 ({path})" in checkout.setup()
    assert checkout.calls() == EVERY_STEP


@pytest.mark.parametrize("name", ["micromamba", "mamba", "conda"])
def test_conda_fetches_one(checkout: Checkout, mirror: Path, name: str):
    conda = checkout.program(name, CONDA)
    printed = checkout.setup(CONDA_MIRROR=str(mirror))
    assert f"no {NEEDED} here: {conda} fetches Python 3.12" in printed
    assert f"({checkout.root}/.python/conda/bin/python3.12)" in printed
    assert checkout.calls() == ["conda", *EVERY_STEP]


def test_a_conda_that_is_not_on_the_path_is_found(checkout: Checkout, mirror: Path, tmp_path: Path):
    conda = checkout.program("conda", CONDA, tmp_path / "miniforge" / "bin")
    checkout.setup(CONDA_EXE=str(conda), CONDA_MIRROR=str(mirror))
    assert checkout.calls() == ["conda", *EVERY_STEP]


def test_uv_comes_from_pypi_where_nothing_else_is_there(
    checkout: Checkout, mirror: Path, tmp_path: Path
):
    checkout.python("python3", "3.14.3")
    uv = checkout.program("uv", UV, tmp_path / "pypi")
    settings = {"UV_OF_PYPI": str(uv), "UV_PYTHON_INSTALL_MIRROR": f"file://{mirror}"}
    printed = checkout.setup(**settings)
    assert "(there is only 3.14.3) here: uv from PyPI fetches Python 3.12 into" in printed
    assert checkout.calls() == ["environment", "uv-from-PyPI", "uv", *EVERY_STEP]
    left = {path.name for path in (checkout.root / ".python").iterdir()}
    assert left == {"cpython-3.12.11-linux-x86_64-gnu", "fetch.log"}


def test_the_next_way_is_tried_where_one_fails(checkout: Checkout, mirror: Path, newer: Path):
    checkout.program("uv", UV)
    checkout.program("conda", CONDA)
    printed = checkout.setup(CONDA_MIRROR=str(mirror))
    assert "    " in printed and "the network is unreachable" in printed
    assert checkout.calls() == ["uv", "conda", *EVERY_STEP]


def test_where_all_ways_fail_the_end_says_what_is_left(checkout: Checkout, newer: Path):
    checkout.program("uv", UV)
    checkout.program("conda", CONDA)
    printed = checkout.setup(expected=2)
    assert printed.splitlines()[-1] == (
        "setup: no Python could be fetched. UV_PYTHON_INSTALL_MIRROR= names a mirror for uv, "
        "PYTHON= an interpreter; or use the image, which has all that is needed: make image"
    )
    assert checkout.calls() == ["uv", "conda"]
    assert not (checkout.root / ".venv").exists()


def test_python_still_decides(checkout: Checkout, mirror: Path, newer: Path):
    checkout.program("uv", UV)
    mirror_setting = f"file://{mirror}"
    printed = checkout.setup(expected=2, PYTHON="python3", UV_PYTHON_INSTALL_MIRROR=mirror_setting)
    assert "PYTHON=python3 is Python 3.14.3" in printed and "unset" in printed
    assert checkout.calls() == []
    path = checkout.python("mine", "3.10.13")
    printed = checkout.setup(PYTHON=str(path), UV_PYTHON_INSTALL_MIRROR=mirror_setting)
    assert f"Python 3.10.13 ({path})" in printed
    assert checkout.calls() == EVERY_STEP


def test_nothing_is_fetched_where_a_compiler_is_missing(checkout: Checkout, mirror: Path):
    checkout.program("uv", UV)
    (checkout.programs / "g++").unlink()
    printed = checkout.setup(expected=2, UV_PYTHON_INSTALL_MIRROR=f"file://{mirror}")
    assert printed == "setup: missing: g++. To install: apt-get install g++\n"
    assert checkout.calls() == []


def test_an_old_python_does_not_install_uv(checkout: Checkout):
    checkout.python("python3", "3.7.16")
    checkout.python("python", "2.7.18")
    printed = checkout.setup(expected=2)
    assert printed == (
        f"setup: missing: one of {NEEDED} (there is only 3.7.16, 2.7.18) or what "
        "fetches it (uv, conda, python3 with venv). To install: apt-get install python3 "
        "python3-venv; or use the image, which has all that is needed: make image\n"
    )
    assert checkout.calls() == []


def test_the_python_that_is_fetched_has_the_tensorflow(checkout: Checkout):
    checkout.python("python3", "3.12.3")
    checkout.program("uv", UV)
    printed = checkout.setup(expected=2, TENSORFLOW="2.15")
    assert "no Python 3.11, 3.10, 3.9 for TensorFlow 2.15 (there is only 3.12.3" in printed
    assert "fetches Python 3.11 into" in printed
