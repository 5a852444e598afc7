"""The uv of PyPI fetches a Python from a local mirror, as set-up calls it."""

from __future__ import annotations

import json
import re
import sys
import tarfile
from pathlib import Path

import pytest
from checkout_copy import run
from scratch_checkout import EVERY_STEP, ROOT, Checkout

pytestmark = pytest.mark.matrix
RELEASES = "https://github.com/astral-sh/python-build-standalone/releases/download"
ARCHIVE = "20250317/cpython-3.12.11+20250317-x86_64-unknown-linux-gnu-install_only.tar.gz"
# uv rewrites this file: the compiler of the machine that built Python is not on this one.
SETTINGS = """# system configuration generated and used by the sysconfig module
build_time_vars = {'CC': 'clang',
 'CXX': 'clang++'}
"""


@pytest.fixture(scope="module")
def uv(package_index: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Installs the release of uv that set-up asks for."""
    folder = tmp_path_factory.mktemp("uv")
    setup = (ROOT / "tools" / "setup.sh").read_text(encoding="utf-8")
    requirement = setup.partition("UV='")[2].partition("'")[0]
    run(sys.executable, "-m", "pip", "install", "--target", folder, requirement, cwd=folder)
    return folder / "bin" / "uv"


@pytest.fixture
def mirror(checkout: Checkout, tmp_path: Path) -> dict[str, str]:
    """Packs a small stand-in for Python as the releases are packed; returns uv's settings."""
    checkout.python("python3.12", "3.12.11", folder=tmp_path / "python" / "bin")
    library = tmp_path / "python" / "lib" / "python3.12"
    library.mkdir(parents=True)
    (library / "_sysconfigdata__linux_x86_64-linux-gnu.py").write_text(SETTINGS)
    archive = tmp_path / "mirror" / ARCHIVE
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(tmp_path / "python", "python")
    # Else uv expects the checksum of the real release.
    release = {
        "name": "cpython",
        "arch": {"family": "x86_64", "variant": None},
        "os": "linux",
        "libc": "gnu",
        "major": 3,
        "minor": 12,
        "patch": 11,
        "prerelease": "",
        "url": f"{RELEASES}/{ARCHIVE.replace('+', '%2B')}",
        "sha256": None,
        "variant": None,
        "build": "20250317",
    }
    releases = tmp_path / "releases.json"
    releases.write_text(json.dumps({"cpython-3.12.11-linux-x86_64-gnu": release}))
    return {
        "UV_PYTHON_INSTALL_MIRROR": f"file://{tmp_path}/mirror",
        "UV_PYTHON_DOWNLOADS_JSON_URL": str(releases),
    }


@pytest.mark.parametrize("is_on_path", [True, False], ids=["found", "from-PyPI"])
def test_the_mirror_is_asked(
    checkout: Checkout, uv: Path, mirror: dict[str, str], is_on_path: bool
):
    checkout.python("python3", "3.14.3")
    if is_on_path:
        (checkout.programs / "uv").symlink_to(uv)
    printed = checkout.setup(UV_OF_PYPI=str(uv), **mirror)
    assert "fetches Python 3.12 into" in printed and "this failed" not in printed
    # uv adds a link without the last number.
    fetched = re.search(r"of Python 3\.12\.11 \((.*)\)", printed).group(1)
    folder = checkout.root / ".python" / "cpython-3.12.11-linux-x86_64-gnu"
    assert Path(fetched).resolve() == folder / "bin" / "python3.12"
    first = [] if is_on_path else ["environment", "uv-from-PyPI"]
    assert checkout.calls() == [*first, *EVERY_STEP]
    assert not list((checkout.root.parent).glob(".local/bin/*"))


def test_a_mirror_that_is_not_there_is_named(
    checkout: Checkout, uv: Path, mirror: dict[str, str], tmp_path: Path
):
    (checkout.programs / "uv").symlink_to(uv)
    nowhere = {**mirror, "UV_PYTHON_INSTALL_MIRROR": f"file://{tmp_path}/nowhere"}
    printed = checkout.setup(expected=2, **nowhere)
    assert f"{tmp_path}/nowhere/" in printed
    assert "UV_PYTHON_INSTALL_MIRROR= names a mirror for uv" in printed
    assert checkout.calls() == []
