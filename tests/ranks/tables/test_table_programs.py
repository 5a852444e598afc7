"""Random programs of training, evaluation, saves, restores under other policies and removals leave
in tables what they leave in a dictionary, whatever their policies admit and evict, and wherever
rows are.
"""

import os

import pytest

from collective.ops import kernel_device
from tests.ranks.table_program_sessions import Program

SESSIONS = 3


def seeds():
    """Reads COLLECTIVE_TEST_PROGRAMS: first:last, of seeds first to last - 1."""
    first, _, last = os.environ.get("COLLECTIVE_TEST_PROGRAMS", "5").rpartition(":")
    return range(int(first or 0), int(last))


@pytest.mark.matrix
@pytest.mark.sample(2)
@pytest.mark.spread
@pytest.mark.double("all")
@pytest.mark.parametrize("seed", seeds())
def test_tables_have_what_dictionaries_have(strategy, rank, size, folder, seed):
    """All ranks train the same keys; a session ends with a save, and the next one restores it."""
    program = Program(seed, folder, size, kernel_device.on_device(dynamic=True))
    for _ in range(SESSIONS):
        program.run_session(strategy, rank)
