"""Makes one report of what several ranks report about one phase of a case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.rank_plugin.launching import Result

# How a rank's failure begins that is another rank's (tests/ranks/conftest.py raises it).
ELSEWHERE = "failed on other ranks:"


def merged(config: pytest.Config, results: Sequence[Result]) -> list[pytest.TestReport]:
    """Returns the reports of a case's phases. A phase that failed on one rank has failed."""
    reports = [[_report(config, data) for data in result.phases] for result in results]
    phases = dict.fromkeys(report.when for of_rank in reports for report in of_rank)
    joined = []
    for phase in phases:
        by_rank = {
            rank: report
            for rank, of_rank in enumerate(reports)
            for report in of_rank
            if report.when == phase
        }
        joined.append(_merged(by_rank, [result.output for result in results]))
    return joined


def _report(config: pytest.Config, data: dict[str, Any]) -> pytest.TestReport:
    report = config.hook.pytest_report_from_serializable(config=config, data=data)
    if isinstance(report.longrepr, list):  # why it was skipped: JSON knows no tuples
        report.longrepr = tuple(report.longrepr)
    return report


def _merged(reports: dict[int, pytest.TestReport], outputs: Sequence[str]) -> pytest.TestReport:
    failed = [rank for rank, report in reports.items() if report.failed]
    if not failed:
        return reports[min(reports)]
    own = [rank for rank in failed if ELSEWHERE not in reports[rank].longreprtext] or failed
    report = reports[own[0]]
    sections = [("Failed on", f"rank {', '.join(map(str, own))}")]
    for rank in own[1:]:
        sections.append((f"Failure of rank {rank}", reports[rank].longreprtext))
    for rank, other in reports.items():
        sections += [(f"{title}, rank {rank}", text) for title, text in other.sections]
    for rank, output in enumerate(outputs):
        if output.strip():
            sections.append((f"Captured stdout, rank {rank}", output))
    report.sections = sections
    return report


def crashed(item: pytest.Item, text: str, when: str, duration: float) -> pytest.TestReport:
    """Returns the report of a case whose launch has come to an end."""
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={name: 1 for name in item.keywords},
        outcome="failed",
        longrepr=text,
        when=when,  # type: ignore[arg-type]
        duration=duration,
    )
