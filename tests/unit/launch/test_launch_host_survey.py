"""What --check makes of hosts that answer late, not at all, or with something else."""

from __future__ import annotations

import json
import re
import socket
import sys
from dataclasses import asdict, replace

import pytest

from collective.launch.check import host_facts, host_survey
from collective.launch.check.host_facts import MARK
from collective.launch.connection.ssh import SshOptions
from tests.unit.launch.test_launch_host_findings import HERE

FACTS = MARK + json.dumps(asdict(replace(HERE, port=1)))
ENDLESS = "while True: sys.stdout.write('x' * 65536)"


def survey(monkeypatch, told: str, then: str = "sys.stdin.read()"):
    """Asks hosts a and b, which say `told` and go on with a line of Python."""
    program = f"import sys; sys.stdin.readline(); print({told!r}, flush=True)\n{then}"
    command = [sys.executable, "-c", program]
    monkeypatch.setattr(host_survey, "command_on_host", lambda *_: command)
    monkeypatch.setattr(host_survey, "_addresses", lambda _: ["127.0.0.1"])
    return host_survey.survey(["a", "b"], SshOptions(), "lo", [], 3.0).answers


@pytest.mark.slow
@pytest.mark.parametrize("then", ["sys.stdin.read()", "sys.exit()"])
def test_a_host_that_does_not_say_whom_it_reaches(monkeypatch, then):
    for answer, other in zip(survey(monkeypatch, FACTS, then), "ba"):
        assert answer.unreachable == {other: "it did not say so within 3 s"}


def test_a_host_that_reaches_all(monkeypatch):
    said = f"sys.stdin.readline(); print({MARK + '{}'!r}, flush=True)"
    assert [a.unreachable for a in survey(monkeypatch, FACTS, said)] == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "then", "words"),
    [
        ("", ENDLESS, "it did not answer within 3 s|no fact"),
        (MARK + '{"clock": "noon"}', "sys.stdin.read()", "another version of this package"),
        (FACTS.replace('"clock": 0.0', '"clock": "noon"'), "", "another version of this package"),
    ],
    ids=["endless", "words", "a wrong type"],
)
def test_a_host_that_answers_something_else(monkeypatch, told, then, words):
    assert all(re.search(words, a.problem) for a in survey(monkeypatch, told, then))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_more_hosts_than_a_listener_s_queue_holds_reach_it(address, monkeypatch):
    """Old kernels keep 128 connections that nobody takes, and drop others without a word."""
    monkeypatch.setattr(socket, "SOMAXCONN", 1)
    with host_facts.listener_at(address) as listener:
        port = listener.getsockname()[1]
        peers = [(str(number), address, port) for number in range(60)]
        assert host_facts.unreachable_peers(peers) == {}
    assert host_facts.unreachable_peers(peers[:1]) == {"0": "Connection refused"}
