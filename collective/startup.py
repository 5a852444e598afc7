"""Prints on rank 0 what a slow start is doing, from the first table to the first training step.

A quick start prints nothing. If a start takes longer, lines on stderr say what is being done and
how far it has got, at least every ten seconds. If nothing has changed for two minutes, the same
line is repeated less and less often: somebody may be debugging, or a prediction takes its time.

    collective: building the model: 180 tables, 150 lookups and 21,400 operations so far (8 s)
    collective: the optimizer makes slots and updates of 150 variables (21 s)
    collective: starting to run the graph, 80 of 600 tables and slots have their initial values (29
        s)
    collective: the first training step (46 s)

A thread checks once a second; it ends with the first training step, or when nothing happens any
more. scope(plan='quiet') silences it.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Callable

from collective.ops.communication import collectives
from collective.ops.counting import counted
from collective.scope import SCOPES

# Seconds before a busy start prints its first line; and between two lines.
FIRST_LINE, NEXT_LINE = 4.0, 8.0
# Seconds after which each pause between equal lines is twice the previous one.
LONG_START = 120.0
# Seconds between two checks, and without any work after which checking ends.
LOOK, IDLE = 1.0, 60.0
# Runs of a graph after which its start is over if it doesn't train (an evaluation, for example).
RUNS_OF_A_START = 20
BUILDING, RUNNING = "building the model", "starting to run the graph"


class Startup:
    """Follows the start of one graph: the graph in which a table was made last.

    Args:
        clock: returns seconds.
        say: prints a line.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ):
        self._clock, self._say = clock, say
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._follow(None)

    def _follow(self, graph: Any) -> None:
        self._graph: Callable[[], Any] = (lambda: None) if graph is None else weakref.ref(graph)
        self._tables = self._lookups = self._to_initialise = self._initialised = self._runs = 0
        self._work: list[str] = []
        self._version = -1
        self._is_over = False
        self._begin()

    def _begin(self) -> None:
        """Counts the seconds from now on."""
        self._since = self._heard = self._busy_at = self._clock()
        self._has_spoken = False
        self._said = ""
        self._pause = NEXT_LINE  # before the same words are said again

    # ---- Told by the library

    def makes_table(self, graph: Any) -> None:
        """Notes that a table is being made in `graph`, whose start is followed from now on."""
        if self._graph() is not graph:
            self._follow(graph)
        self._tables += 1
        self._look_after()

    def made_lookup(self, graph: Any) -> None:
        """Notes that a lookup was written."""
        if self._graph() is graph:
            self._lookups += 1

    def will_initialise(self, graph: Any) -> None:
        """Notes that a table or a slot has initial values to be drawn."""
        if self._graph() is graph:
            self._to_initialise += 1

    def initialised(self) -> None:
        """Notes that the initial values of a table or a slot were drawn, by any thread."""
        self._initialised += 1

    @contextlib.contextmanager
    def doing(self, graph: Any, work: str) -> Iterator[None]:
        """Prints `work` if the work inside takes long, before the first training step."""
        if not self.follows(graph):
            yield
            return
        self._look_after()
        self._work.append(work)
        try:
            yield
        finally:
            if work in self._work:
                self._work.remove(work)

    @contextlib.contextmanager
    def running(self, graph: Any) -> Iterator[None]:
        """Follows a run of `graph`; after several runs that don't train, its start is over."""
        if not self.follows(graph):
            yield
            return
        with self.doing(graph, RUNNING):
            yield
        self._runs += 1
        if self._runs >= RUNS_OF_A_START:
            self.over(graph)

    def follows(self, graph: Any) -> bool:
        """Tells whether the start of `graph` is followed."""
        return graph is not None and not self._is_over and self._graph() is graph

    def over(self, graph: Any) -> None:
        """Ends the start of `graph`: it has trained."""
        if self._graph() is graph:
            self._is_over = True
            self._ended.set()

    # ---- What is said, and when

    def due_line(self) -> str | None:
        """Returns the line that is to be said now, if any."""
        graph, now = self._graph(), self._clock()
        if graph is None or self._is_over:
            return None
        if not self._work and graph.version == self._version:
            # The script is busy with its own work, which it can report itself.
            self._heard = now
            return None
        self._version, self._busy_at = graph.version, now
        phase = (self._work[-1:] or [BUILDING])[0]
        words = self._doing_now(phase, graph)
        if words != self._said:
            self._pause = NEXT_LINE
        if now - self._heard < (self._pause if self._has_spoken else FIRST_LINE):
            return None
        if now - self._since >= LONG_START and words == self._said:
            self._pause *= 2
        self._said, self._heard, self._has_spoken = words, now, True
        return f"collective: {words} ({now - self._since:.0f} s)"

    def _doing_now(self, phase: str, graph: Any) -> str:
        if phase == BUILDING:
            tables, lookups = counted(self._tables, "table"), counted(self._lookups, "lookup")
            operations = counted(graph.version, "operation")
            return f"{BUILDING}: {tables}, {lookups} and {operations} so far"
        if phase == RUNNING and 0 < self._initialised <= self._to_initialise:
            of = f"{self._initialised:,} of {self._to_initialise:,}"
            return f"{RUNNING}, {of} tables and slots have their initial values"
        return phase

    # ---- The thread

    def _look_after(self) -> None:
        """Starts the thread on rank 0 unless it runs."""
        if self._thread is not None and self._thread.is_alive():
            return
        if self._is_over or collectives.rank() > 0 or SCOPES.options.plan == "quiet":
            return
        self._ended.clear()
        self._begin()
        self._thread = threading.Thread(target=self._look, name="collective-startup", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(LOOK):
            is_idle = self._graph() is None or self._clock() - self._busy_at > IDLE
            if is_idle or not SCOPES.is_open:
                return
            line = self.due_line()
            if line is None or SCOPES.options.plan == "quiet":
                continue
            try:
                self._say(line)
            except (OSError, ValueError):  # nobody reads stderr any more
                return

    def end(self) -> None:
        """Ends the thread: a process that ends must not find it printing."""
        self._ended.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)


STARTUP = Startup()
atexit.register(STARTUP.end)
