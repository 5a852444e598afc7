"""Tests that the launcher of another host follows the first host's orders in whatever order."""

from __future__ import annotations

import pytest

from collective.job.hosts import Host
from collective.launch.connection.frames import Refused
from collective.launch.other_hosts import host_agent
from collective.launch.planning.plan import LaunchPlan

HOSTS = (Host("a", (None,)), Host("b", (None,)))
PLAN = LaunchPlan(("python",), (None,) * 2, {}, 1, hosts=HOSTS, node=1)


class Ranks:
    """Stands for the ranks of an attempt."""

    def __init__(self, plan, *_):
        self.attempt = plan.restart_count
        self.done = self.closed = False

    def close(self):
        assert self.done
        self.closed = True


def start(attempt):
    return {"kind": "start", "attempt": attempt, "restarts": 3, "watched": False, "shown": []}


def test_a_start_may_come_before_the_end_of_the_last_attempt_was_looked_at(monkeypatch):
    """This launcher was stopped between the two, and the first host restarts without a pause."""
    monkeypatch.setattr(host_agent, "_RunningRanks", Ranks)
    agent = host_agent.HostAgent(PLAN, None, None)
    agent._take(start(0))
    first = agent._ranks
    with pytest.raises(Refused, match="a start while ranks run"):
        agent._take(start(1))
    first.done = True
    agent._take(start(1))
    assert first.closed and agent._ranks is not first and agent._ranks.attempt == 1
