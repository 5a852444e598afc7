"""What ranks on several hosts exchange when they start leaves the process to the script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.timeout(200)
def test_the_first_session_of_a_script_has_the_threads_that_it_asks_for(hosts):
    """TensorFlow keeps the numbers of a process's first session, whatever later ones say."""
    hosts.make(2)
    program = Path(__file__).with_name("session_threads.py")
    ends = hosts.ends(hosts.start_all(2, "--device", "cpu", program), 120)
    assert [code for code, _, _ in ends] == [0, 0], ends[0][2]
    # 5 that run operations, and 9 within one, of which the one that runs it is one. TensorFlow
    # may start one or two for itself.
    assert 5 + 9 - 1 <= int(re.search(r"threads (\d+)", ends[0][1])[1]) <= 5 + 9 + 1
