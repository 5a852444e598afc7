"""Makes the modules of the example programs importable: an example's folder stands alone, no
package around it.

So no two of them may have modules of one name, but for train.py, which tests start and don't
import.
"""

import os
import sys
from pathlib import Path

import pytest

sys.path[:0] = [
    str(Path(__file__).resolve().parents[2] / "modelzoo" / name)
    for name in ("census_income", "movielens")
]


@pytest.fixture(scope="session")
def census_data():
    """The environment with the census data in it; without it tests are skipped or, where CI is set,
    fail.
    """
    folder = os.environ.get("COLLECTIVE_DATA_DIR")
    if not folder or not (Path(folder) / "census-income").is_dir():
        reason = (
            f"COLLECTIVE_DATA_DIR ({folder or 'not set'}) names no folder that holds census-income/"
        )
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return {"COLLECTIVE_DATA_DIR": folder}
