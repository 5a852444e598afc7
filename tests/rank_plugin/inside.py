"""Runs, on a rank, the cases that it is given, and reports each to the launching process."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rank_plugin.configuration import FIRST_HOST

# The folder that the launching process shares with the ranks: `cases` has the node ids, one a line;
# to `reports.R` rank R writes one JSON object a line, to `output.R` goes all that it prints.
FOLDER = "COLLECTIVE_TEST_FOLDER"

# Of the ranks: a tenth of the processors where tests of jobs want them all.
NICENESS = 10


def places_on_two_hosts(rank: int, size: int, first: int) -> dict[str, str]:
    """Returns the variables by which a rank counts as one of two hosts.

    Args:
        rank, size: among all ranks.
        first: how many ranks the first host has.
    """
    host = int(rank >= first)
    local_rank = rank - host * first
    local_size = size - first if host else first
    # "Cross" ranks have the same local rank on the hosts that have so many.
    both = local_rank < min(first, size - first)
    return {
        "HOROVOD_HOSTNAME": f"host{host}",
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(local_size),
        "HOROVOD_CROSS_RANK": str(host if both else 0),
        "HOROVOD_CROSS_SIZE": str(1 + both),
    }


def let_others_go_first() -> None:
    """Gives this process what others leave of the processors, as tests of jobs do half of them.

    Where Linux groups processes by session, a process's own niceness counts within its group only.
    """
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # none, or it was set a moment ago
        Path("/proc/self/autogroup").write_text(f"{NICENESS}\n", encoding="ascii")


class Reporter:
    """Selects the cases to run, in the order of the list, and writes what becomes of them."""

    def __init__(self, config: pytest.Config, folder: Path):
        let_others_go_first()
        self._config = config
        self._cases = (folder / "cases").read_text(encoding="utf-8").splitlines()
        rank = os.environ["HOROVOD_RANK"]
        if FIRST_HOST in os.environ:
            os.environ.update(
                places_on_two_hosts(
                    int(rank), int(os.environ["HOROVOD_SIZE"]), int(os.environ[FIRST_HOST])
                )
            )
        # each line reaches the file at once
        self._file = open(folder / f"reports.{rank}", "w", encoding="utf-8", buffering=1)
        self._output = open(folder / f"output.{rank}", "ab", buffering=0)
        # A file keeps what a process wrote that crashes, also in C++; pytest's capturing doesn't.
        for descriptor in (1, 2):
            os.dup2(self._output.fileno(), descriptor)

    def _tell(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, **values}) + "\n")

    def _written(self) -> int:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return os.fstat(self._output.fileno()).st_size

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        collected = {item.nodeid: item for item in items}
        missing = [case for case in self._cases if case not in collected]
        if missing:
            raise pytest.UsageError(f"this rank does not collect {missing[:5]}")
        items[:] = [collected[case] for case in self._cases]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell("started", case=nodeid, at=self._written())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._tell("report", case=report.nodeid, report=data)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._tell("finished", case=nodeid, at=self._written())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Leaves with 0 where cases have failed: at another code the launcher ends the peers."""
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = pytest.ExitCode.OK
