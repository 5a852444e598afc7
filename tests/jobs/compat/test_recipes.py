"""What the error of a refused name says to do instead is done by a script, and works."""

from __future__ import annotations

from pathlib import Path

import pytest

from collective.compat.names.deeprec import DEEPREC
from collective.compat.names.horovod import HOROVOD
from collective.compat.names.hybridbackend import HYBRIDBACKEND
from collective.compat.names.sok import SOK
from tests.jobs import pool

SCRIPT = Path(__file__).with_name("tried_recipes.py")


@pytest.mark.matrix
@pytest.mark.parametrize("framework", ["deeprec", "horovod"])
def test_recipes_of_refused_names(framework: str, tmp_path: Path):
    """DeepRec's scripts have the names of HybridBackend and SparseOperationKit, too."""
    frameworks = (HOROVOD,) if framework == "horovod" else (DEEPREC, HYBRIDBACKEND, SOK)
    refused = {name.theirs for each in frameworks for name in each.names if name.kind == "refused"}
    done = pool.launch("-np", 2, "--device", "cpu", "--as", framework, SCRIPT, tmp_path, framework)
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        told = f"[{rank}] tried "
        tried = {
            line.removeprefix(told) for line in done.stdout.splitlines() if line.startswith(told)
        }
        assert tried == refused
