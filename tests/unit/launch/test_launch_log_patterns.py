"""Lines of ranks that end restarts, or leave out a host."""

from __future__ import annotations

import os

import pytest

from collective.job.errors import UsageError
from collective.job.hosts import Host
from collective.job.milestones import Milestones
from collective.launch.output.log_patterns import LogPatterns, Match, check_patterns
from collective.launch.output.outcome import JobOutcome, RankExit
from collective.launch.output.rank_output import RankStream
from collective.launch.planning.plan import LaunchPlan
from collective.launch.restarts import Failure, RestartPolicy, failure_of

OOM = Match(1, "out of memory", "CUDA out of memory", False)
ECC = Match(2, "ECC", "uncorrectable ECC error", True)
HOSTS = (Host("h1", (None, None)), Host("h2", (None, None)))


def plan(hosts=(), **options) -> LaunchPlan:
    devices = (None,) * (4 if hosts else 2)
    options = {"max_restarts": 3, "most_ranks": 4, "hosts": hosts, **options}
    return LaunchPlan(("python",), devices, {}, 8, **options)


def decide(*matches: Match, **options):
    failure = Failure(0, last_step=5, has_trained=True, matches=matches)
    return RestartPolicy(lambda: ()).decide(failure, plan(**options))


def found(*pieces: bytes, no_restart=("out of memory",), leave_out=("ECC.*page",)):
    patterns = LogPatterns(no_restart, leave_out)
    search = patterns.of_stream(3)
    for piece in pieces:
        search.take(piece)
    search.end()
    return [(match.rank, match.pattern, match.line) for match in patterns.matches]


def test_a_line_may_come_in_pieces_and_without_an_end():
    line = (3, "out of memory", "CUDA out of memory: 3 GB")
    assert found(b"x\nCUDA out of", b" mem", b"ory: 3 GB\ny\n") == [line]
    assert found(b"CUDA out of memory: 3 GB") == [line]
    assert found(b"\rCUDA out of memory: 3 GB\r\nCUDA out of memory again\n") == [line]


def test_a_pattern_does_not_reach_over_lines():
    assert found(b"ECC\npage\n") == []
    assert found(b"bad ECC on a page\xff\n") == [(3, "ECC.*page", "bad ECC on a page\ufffd")]


def test_a_line_without_an_end_takes_no_memory():
    patterns = LogPatterns(["end"], [])
    search = patterns.of_stream(0)
    for _ in range(100):
        search.take(b"x" * 100_000)
    assert len(search._begun) < 100_000
    search.take(b"end\nend\n")
    assert [match.line for match in patterns.matches] == ["end"]


def test_a_stream_that_is_not_shown_is_searched():
    reading, writing = os.pipe()
    patterns = LogPatterns(["memory"], [])
    stream = RankStream(reading, "[0] ", None, None)
    stream.search(patterns.of_stream(0))
    os.write(writing, b"out of memory")
    os.close(writing)
    stream.drain()
    stream.close()
    assert [match.line for match in patterns.matches] == ["out of memory"]


def test_a_line_that_ends_retries():
    decision = decide(OOM, ECC, hosts=HOSTS, starts_hosts=True)
    assert decision.restart is None and not decision.left_out
    assert decision.text == (
        "  no restart: rank 1 wrote 'CUDA out of memory' (--no-restart-after 'out of memory')"
    )


def test_a_host_is_left_out():
    decision = decide(ECC, hosts=HOSTS, starts_hosts=True)
    assert decision.restart is None and decision.left_out == {"h2"}
    assert decision.text == (
        "  restart    1 of 3, from the beginning: no checkpoint is known, without host h2: rank 2 "
        "wrote 'uncorrectable ECC error' (--leave-out-host-after 'ECC')"
    )


def test_a_host_that_cannot_be_left_out():
    of_first = Match(0, "ECC", "ECC", True)
    assert "and there is no other host" in decide(of_first).text
    both = decide(of_first, ECC, hosts=HOSTS, starts_hosts=True)
    assert "and there is no other host" in both.text and not both.left_out
    each = decide(ECC, hosts=HOSTS)
    assert "start the job again without host h2" in each.text and not each.left_out


def test_the_number_of_restarts_counts_those_without_a_host():
    last = decide(ECC, hosts=HOSTS, starts_hosts=True, restart_count=3)
    assert "that was the last of --max-restarts 3" in last.text and not last.left_out


def test_a_failure_without_such_a_line_is_restarted():
    assert decide().restart is not None


def test_matches_are_facts_of_a_failure():
    outcome = JobOutcome(1)
    outcome.add(RankExit(0, 1, 1, 0.0))
    assert failure_of(outcome, [Milestones()], matches=[OOM]).matches == (OOM,)


def test_a_long_line_is_cut_in_the_report():
    assert len(str(Match(0, "x", "x" * 1000, False))) < 200


def test_a_pattern_that_is_none():
    with pytest.raises(UsageError, match="--no-restart-after \\(: no regular expression"):
        check_patterns("--no-restart-after", ["("])
