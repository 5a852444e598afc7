"""Makes the folders of modelzoo/ importable in tests, and gives them data."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "modelzoo"))


@pytest.fixture(scope="session")
def census_data():
    """Returns the environment variable that names the folder of the census data.

    Without the data, tests that need it are skipped or, where CI is set, fail.
    """
    folder = os.environ.get("COLLECTIVE_DATA_DIR")
    if not folder or not (Path(folder) / "census-income").is_dir():
        reason = (
            f"COLLECTIVE_DATA_DIR ({folder or 'not set'}) names no folder that holds census-income/"
        )
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return {"COLLECTIVE_DATA_DIR": folder}


@pytest.fixture
def no_data_dir(monkeypatch):
    monkeypatch.delenv("COLLECTIVE_DATA_DIR", raising=False)


@pytest.fixture
def no_sleep(monkeypatch):
    """Lets ranks other than 0 exit at once where they would let rank 0 go first."""
    from common import command_line

    monkeypatch.setattr(command_line.time, "sleep", lambda seconds: None)
