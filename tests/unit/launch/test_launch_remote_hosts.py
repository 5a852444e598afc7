"""Tests what the first host's launcher takes of another host, and what it tells it."""

from __future__ import annotations

import base64
import selectors
import signal
import socket
import time

import pytest

from collective.job.hosts import Host
from collective.job.key_value_store import Entry
from collective.job.progress_board import Phase
from collective.launch.connection.channel import Channel, ChannelClosed
from collective.launch.connection.rendezvous import Guest
from collective.launch.other_hosts.remote_hosts import RemoteHosts
from collective.launch.planning.plan import LaunchPlan

SECRET = b"a secret of the test"
HOSTS = (Host("a", (None,)), Host("b", (None, None)))
PLAN = LaunchPlan(("python",), (None,) * 3, {}, 1, hosts=HOSTS, shown_ranks=frozenset({0, 2}))


class Attempt:
    """Notes what it is told."""

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        return lambda *words: self.told.append((name, *words))


class Pair:
    """Holds the first host's view, and the other host's end of the channel."""

    def __init__(self, timeout=60.0):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            connection = socket.create_connection(listener.getsockname())
            accepted, _ = listener.accept()
        self.agent = Channel(connection, SECRET, False, timeout)
        own = Channel(accepted, SECRET, True, timeout)
        while not (self.agent.authenticated and own.authenticated):
            self.agent.flush()
            own.receive()
            self.agent.receive()
        self.hosts = RemoteHosts({1: Guest(own, "b", (None, None))}, PLAN)
        self.attempt = Attempt()
        self.selector = selectors.DefaultSelector()
        self.hosts.start(PLAN, self.attempt, self.selector, lambda: None)

    def hear(self, congested=False):
        """Has the first host take what has come; returns what it has told the other."""
        self.hosts.watch()
        for key, _ in self.selector.select(0.05):
            key.data()
        self.hosts.look(time.monotonic(), congested)
        try:
            return [m for m in self.agent.receive() if m["kind"] not in ("alive", "start")]
        except ChannelClosed:
            return []


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.agent.close()
    made.selector.close()


def test_the_start_says_what_is_shown(pair):
    [start] = [m for m in pair.agent.receive() if m["kind"] == "start"]
    assert start["shown"] == [2] and start["watched"] is True and start["attempt"] == 0


def test_the_ranks_of_a_host_are_the_jobs(pair):
    pair.agent.send("exited", rank=2, pid=7, code=-9, time=1.5, words=["last"], source="stderr")
    pair.agent.send("milestones", rank=1, pid=7, steps=3, start=4, checkpoint="/c", step=5)
    pair.agent.send("stopped", number=15)
    pair.agent.send("trouble", text="a disk is full")
    pair.agent.send("done")
    pair.hear()
    told = {name: words for name, *words in pair.attempt.told}
    [rank_exit] = told["on_rank_exit"]
    assert (rank_exit.rank, rank_exit.code, rank_exit.host) == (2, -9, "b")
    assert rank_exit.last_lines == ("last",)
    assert told["on_milestones"][0] == 1 and told["on_milestones"][1].last_step == 7
    assert told["on_stop_signal"] == [signal.SIGTERM, "b"]
    assert told["on_trouble"] == ["host b: a disk is full"]
    assert pair.hosts.done


def test_progress_is_of_this_hosts_clock(pair):
    fields = {"pid": 9, "phase": int(Phase.RUNNING), "passed": 4, "doing": "x", "collectives": ""}
    there = 10**18  # nanoseconds: another machine's clock
    pair.agent.send("progress", rank=1, since=there - 5 * 10**9, clock=there, **fields)
    pair.hear()
    record = pair.hosts.records[1]
    age = (time.monotonic_ns() - record.since) / 1e9
    assert 5 <= age < 6 and record.phase == Phase.RUNNING
    pair.agent.send("progress", rank=1, since=there - 5 * 10**9, clock=there + 10**9, **fields)
    pair.hear()
    assert pair.hosts.records[1] == record  # as nothing has changed there


WRONG = {
    "another host's rank": ("exited", {"rank": 0, "pid": 1, "code": 0, "time": 1, "words": [],
                                       "source": ""}),
    "no rank": ("output", {"rank": 3, "error": False, "data": ""}),
    "no base64": ("output", {"rank": 1, "error": False, "data": "*"}),
    "no signal": ("stopped", {"number": 4711}),
    "no phase": ("progress", {"rank": 1, "pid": 1, "phase": 77, "passed": 0, "since": 0,
                              "clock": 0, "doing": "", "collectives": ""}),
    "no number": ("milestones", {"rank": 1, "pid": -1, "steps": 0, "start": 0, "checkpoint": "",
                                 "step": 0}),
    "the first host's": ("signal", {"number": 9, "groups": True}),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_a_host_that_sends_what_it_may_not_is_lost(pair, kind):
    name, fields = WRONG[kind]
    pair.agent.send(name, **fields)
    pair.hear()
    [(what, host, ranks, reason)] = pair.attempt.told
    assert (what, host, ranks) == ("on_host_lost", "b", range(1, 3))
    assert reason.startswith("it sent what it may not: ")
    assert pair.hosts.done and not pair.hosts  # nobody waits for it any more


def test_output_is_asked_for_as_fast_as_it_is_read(pair):
    data = base64.b64encode(b"x" * 1000).decode()
    pair.agent.send("output", rank=2, error=True, data=data)
    assert pair.hear(congested=True) == []
    assert pair.attempt.told == [("on_output", 2, True, b"x" * 1000)]
    assert pair.hear() == [{"kind": "room", "bytes": 1000}]


def test_what_ranks_do_at_the_rendezvous_goes_to_all_in_one_order(pair):
    pair.agent.send("put", attempt=0, scope="global", key="1", value="b25l")
    pair.hosts.publish(Entry("global", "0", None))
    pair.agent.send("put", attempt=7, scope="global", key="1", value="b25l")  # of another attempt
    told = pair.hear()
    assert pair.attempt.told == [
        ("apply", Entry("global", "1", b"one")),
        ("apply", Entry("global", "0", None)),
    ]
    assert [(m["kind"], m["key"]) for m in told] == [("put", "1"), ("leave", "0")]


def test_a_host_that_is_silent_is_lost():
    pair = Pair(timeout=0.2)
    end = time.monotonic() + 5
    while pair.hosts and time.monotonic() < end:
        pair.hear()
    assert pair.attempt.told == [
        ("on_host_lost", "b", range(1, 3), "nothing was heard of it for 0.2 s")
    ]


def test_a_host_that_cannot_start_its_ranks_isnt_lost(pair):
    pair.agent.send("unable", reason="--log-dir x can't be written")
    pair.agent.flush()
    pair.hear()
    pair.agent.close()
    assert pair.attempt.told == [
        ("on_host_unable", "b", range(1, 3), "--log-dir x can't be written")
    ]
    assert pair.hosts.done  # nobody waits for it


def test_the_end_is_told_with_its_code(pair):
    pair.hosts.send_signal(signal.SIGTERM, to_groups=False)
    pair.hosts.mark_ending()
    pair.hosts.say("a report")
    pair.hosts.finish(3)
    told = [m for m in pair.agent.receive() if m["kind"] not in ("alive", "start")]
    assert [m["kind"] for m in told] == ["signal", "ending", "say", "over"]
    assert told[0]["groups"] is False and told[3]["code"] == 3
