from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scratch_checkout import EVERY_STEP, Checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def ready(checkout: Checkout) -> Checkout:
    """Sets up a checkout with Python 3.11."""
    checkout.python("python3.11", "3.11.7")
    checkout.setup()
    assert checkout.calls() == EVERY_STEP
    return checkout


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in ("CI", "TENSORFLOW", "PYTHON", "GPU", "VENV") or name.startswith("COLLECTIVE_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def package_index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips tests that install packages where pip reaches no index; fails them where CI is set."""
    folder = tmp_path_factory.mktemp("index")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "wheel"]
    reached = subprocess.run([*command, "--dest", folder], capture_output=True, text=True)
    if reached.returncode:
        reason = f"pip reaches no package index: {reached.stderr.strip()[-300:]}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
