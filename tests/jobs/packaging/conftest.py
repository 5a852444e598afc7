from __future__ import annotations

import os
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
        if name in ("CI", "PYTHON", "GPU", "VENV") or name.startswith("COLLECTIVE_"):
            monkeypatch.delenv(name)
