"""A slow start says what it is busy with; a quick one says nothing."""

from __future__ import annotations

import threading

import pytest

from collective import startup
from collective.ops.communication import collectives
from collective.scope import SCOPES, ScopeOptions


class Graph:
    """As much of a graph as is followed."""

    version = 0


class Start:
    """A start whose clock and thread are the test's."""

    def __init__(self):
        self.now = 0.0
        self.graph = Graph()
        self.startup = startup.Startup(clock=lambda: self.now, say=lambda line: None)

    def pass_seconds(self, seconds: int, work=lambda: None) -> list[str]:
        """Returns the lines that are said while `work` is done once a second."""
        lines = []
        for _ in range(seconds):
            self.now += 1
            work()
            lines.append(self.startup.due_line())
        return [line for line in lines if line]


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(collectives, "rank", lambda: 1)  # no thread
    start = Start()
    start.startup.makes_table(start.graph)
    return start


def build(start):
    def work():
        start.startup.makes_table(start.graph)
        start.startup.made_lookup(start.graph)
        start.graph.version += 100

    return work


def test_building_says_how_much_there_is_so_far(start):
    assert start.pass_seconds(3, build(start)) == []
    assert start.pass_seconds(9, build(start)) == [
        "collective: building the model: 5 tables, 4 lookups and 400 operations so far (4 s)",
        "collective: building the model: 13 tables, 12 lookups and 1,200 operations so far (12 s)",
    ]


def test_no_ten_seconds_are_silent_while_there_is_something_new(start):
    said = []
    for second in range(1, 301):
        if start.pass_seconds(1, build(start)):
            said.append(second)
    assert said == [*range(4, 301, 8)]


def test_no_phase_begins_with_ten_silent_seconds(start):
    """Not even one that follows a phase whose pauses have grown."""
    start.pass_seconds(185, build(start))
    for work in ("taking 300 gradients", "the optimizer makes slots", startup.RUNNING):
        with start.startup.doing(start.graph, work):
            first = start.pass_seconds(9, build(start))
            assert first and len(first + start.pass_seconds(9, build(start))) >= 2


def test_a_phase_that_comes_again_and_again_does_not_restart(start):
    lines = []
    for i in range(300):
        with start.startup.doing(start.graph, f"taking {1 + i % 2} gradients"):
            lines += start.pass_seconds(1, build(start))
    assert len(lines) <= 1 + 300 / 8


def test_a_script_that_does_something_of_its_own_is_left_alone(start):
    start.pass_seconds(2, build(start))
    assert start.pass_seconds(50) == []
    assert start.pass_seconds(3, build(start)) == []  # busy for three seconds since


def test_a_run_says_what_it_does_and_how_much_of_it_is_done(start):
    for _ in range(3):
        start.startup.will_initialise(start.graph)
    running = "collective: starting to run the graph"
    with start.startup.running(start.graph):
        assert start.pass_seconds(4) == [f"{running} (4 s)"]
        start.startup.initialised()
        assert start.pass_seconds(8) == [
            f"{running}, 1 of 3 tables and slots have their initial values (12 s)"
        ]
    with start.startup.doing(start.graph, "the first training step"):
        for _ in range(2):
            start.startup.initialised()
        assert start.pass_seconds(8) == ["collective: the first training step (20 s)"]


def test_after_the_first_training_step_nothing_is_said(start):
    start.startup.over(start.graph)
    with start.startup.running(start.graph):
        assert start.pass_seconds(50, build(start)) == []
    assert not start.startup.follows(start.graph)


def test_a_graph_that_is_only_evaluated_has_started_after_some_runs(start):
    for _ in range(startup.RUNS_OF_A_START):
        assert start.startup.follows(start.graph)
        with start.startup.running(start.graph):
            pass
    assert not start.startup.follows(start.graph)


def test_another_graph_starts_again(start):
    start.pass_seconds(3, build(start))
    other = Graph()
    start.startup.makes_table(other)
    assert not start.startup.follows(start.graph) and start.startup.follows(other)
    other.version = 7
    assert start.pass_seconds(4, lambda: setattr(other, "version", other.version + 1)) == [
        "collective: building the model: 1 table, 0 lookups and 11 operations so far (4 s)"
    ]


def test_a_graph_that_is_gone_is_not_followed(start):
    del start.graph
    assert start.startup.due_line() is None


@pytest.mark.parametrize(
    "rank, plan, speaks", [(0, "print", True), (0, "quiet", False), (1, "print", False)]
)
def test_a_thread_speaks_on_rank_0_unless_the_plan_is_quiet(monkeypatch, rank, plan, speaks):
    monkeypatch.setattr(collectives, "rank", lambda: rank)
    for name in ("FIRST_LINE", "NEXT_LINE", "LOOK"):
        monkeypatch.setattr(startup, name, 0.001)
    monkeypatch.setattr(SCOPES, "defaults", ScopeOptions(plan=plan))
    monkeypatch.setattr(type(SCOPES), "is_open", True)
    said, lines = threading.Event(), []

    def say(line):
        lines.append(line)
        if "something that takes long" in line:
            said.set()

    graph, start = Graph(), startup.Startup(say=say)
    start.makes_table(graph)
    with start.doing(graph, "something that takes long"):
        assert said.wait(10 if speaks else 0.05) == speaks
    start.end()
    assert any("something that takes long" in line for line in lines) == speaks


def test_what_takes_very_long_is_said_ever_more_seldom(start):
    """A debugger in a run, say; something new is said as soon as ever."""
    with start.startup.doing(start.graph, "the first training step"):
        assert len(start.pass_seconds(68)) == 9
        assert 5 <= len(start.pass_seconds(3600)) <= 15
    with start.startup.doing(start.graph, "something else"):
        assert len(start.pass_seconds(60)) == 4
