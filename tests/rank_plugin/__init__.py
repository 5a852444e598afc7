"""Runs the cases of tests/ranks on the ranks of a launch, each reported by its own name.

The process that is started collects the cases, once for each configuration in which they run
(`test_x[2-hb]`), launches the ranks of one configuration after the other with exactly the cases
that were selected, and reports each case as it comes: -k, --lf, ::node ids and junit work as for
any test. A rank, which runs the same files under the same names, is told by its environment. The
first launch begins with the first test, and a later one that is small enough runs in parallel with
the present one; their cases are reported in their turn.

A case in which the ranks crash, or hang, is reported with all they wrote; the cases after it run in
a new launch.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.rank_plugin.configuration import (
    BACKENDS,
    CARRIERS,
    MARKERS,
    TIERS,
    Choice,
    Configuration,
    Marks,
)
from tests.rank_plugin.inside import FOLDER, Reporter
from tests.rank_plugin.launching import Crashed, Launch
from tests.rank_plugin.reports import crashed, merged

# Launches of one configuration: repeated crashes have one common cause.
MOST_LAUNCHES = 4
# Processes that run at a time, this one included where it has tests of its own, unless a launch has
# more ranks: a single one leaves a processor idle.
MOST_PROCESSES = 3


def inside_a_rank() -> bool:
    return "HOROVOD_RANK" in os.environ


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("rank_cases", "the folder of the cases that run on several ranks", default="")
    group = parser.getgroup("ranks", "cases on several ranks (tests/ranks)")
    group.addoption(
        "--tier",
        choices=TIERS,
        default="test",
        help="what `make test` runs (the default), what `make test-slow` or -matrix adds, or all",
    )
    group.addoption(
        "--ranks",
        type=lambda text: tuple(int(number) for number in text.split(",")),
        default=(),
        metavar="N[,N]",
        help="run the rank cases at these numbers of ranks, instead of the tier's",
    )
    group.addoption(
        "--backend",
        type=lambda text: BACKENDS if text == "all" else (text,),
        default=(),
        metavar="|".join((*BACKENDS, "all")),
        help="run the rank cases on this backend, instead of the tier's",
    )
    group.addoption(
        "--ungrouped", action="store_true", help="run the rank cases with lookups not grouped"
    )
    group.addoption(
        "--carrier",
        choices=("auto", *CARRIERS),
        default="auto",
        help="what carries the collectives of the rank cases, instead of the tier's",
    )
    group.addoption(
        "--double",
        action="store_true",
        help="run the rank cases that are marked `double` on the double of a GPU, no others",
    )
    group.addoption(
        "--gpu",
        action="store_true",
        help="run the rank cases that are marked `double` on this machine's GPU, no others",
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if not inside_a_rank():
        config.pluginmanager.register(Launching(config), "rank launches")
    elif FOLDER in os.environ:
        config.pluginmanager.register(Reporter(config, Path(os.environ[FOLDER])), "rank reporter")


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not _is_rank_case(metafunc.definition):
        return
    if inside_a_rank():
        text = os.environ.get("COLLECTIVE_TEST_CONFIGURATION")
        configurations = [Configuration.parse(text)] if text else []
    else:
        configurations = _choice(metafunc.config).of(Marks.of(metafunc.definition))
        configurations = configurations or [None]  # deselected below
    if configurations:
        metafunc.fixturenames.append("configuration")
        metafunc.parametrize("configuration", configurations, ids=str)


def _is_rank_case(node: pytest.Item | pytest.Function) -> bool:
    folder = node.config.getini("rank_cases")
    return bool(folder) and node.config.rootpath / folder in node.path.parents


def _choice(config: pytest.Config) -> Choice:
    option = config.option
    return Choice(
        option.tier,
        option.ranks,
        option.backend,
        not option.ungrouped,
        option.double,
        option.carrier,
        option.gpu,
    )


def _configuration(item: pytest.Item) -> Configuration | None:
    return item.callspec.params["configuration"]  # type: ignore[attr-defined]


class Launching:
    """Is the launching process's side of the plugin."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._collected: dict[tuple, list[pytest.Item]] = {}
        self._chosen: set[pytest.Item] = set()
        self._cases: dict[Configuration, list[pytest.Item]] = {}
        self._running: dict[Configuration, Launch] = {}
        self._launches: dict[Configuration, int] = {}
        self._refused: dict[Configuration, str] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Remembers the items of one function and configuration, which differ in parameters."""
        if _is_rank_case(item) and _configuration(item) is not None:
            key = (item.parent, item.originalname, _configuration(item))  # type: ignore[attr-defined]
            self._collected.setdefault(key, []).append(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves out the rank cases that the tier doesn't run.

        The others come last, sorted by configuration: their ranks run with the tests before them.
        """
        choice = _choice(self._config)
        for (*_, configuration), cases in self._collected.items():
            for number, case in enumerate(cases):
                if choice.runs(Marks.of(case), configuration, number, len(cases)):
                    self._chosen.add(case)
        cases = [item for item in items if _is_rank_case(item)]
        chosen = [case for case in cases if case in self._chosen]
        rest = [case for case in cases if case not in self._chosen]
        if rest:
            self._config.hook.pytest_deselected(items=rest)
        on_device = choice.double or choice.gpu
        unmarked = [case for case in rest if on_device and Marks.of(case).double is None]
        if unmarked:
            option = "--gpu" if choice.gpu else "--double"
            self._say(
                f"{option} leaves out {len(unmarked)} rank cases without the marker `double`, "
                f"{unmarked[0].nodeid} for one: they are not made for a GPU"
            )
        order = {c: i for i, c in enumerate(dict.fromkeys(map(_configuration, chosen)))}
        chosen.sort(key=lambda case: order[_configuration(case)])
        for case in chosen:
            # the ranks have their own limits
            case.add_marker(pytest.mark.timeout(0), append=False)
        items[:] = [*(item for item in items if not _is_rank_case(item)), *chosen]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if _is_rank_case(item):
                self._cases.setdefault(_configuration(item), []).append(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if not _is_rank_case(item):
            self._start_what_fits(1)
            return None
        log, configuration = item.ihook, _configuration(item)
        if configuration not in self._running and configuration not in self._refused:
            self._start(configuration, [item, *self._remaining(item)])
        self._start_what_fits(0)
        log.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item):
            log.pytest_runtest_logreport(report=report)
        log.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if configuration in self._running and not self._remaining(item):
            self._running.pop(configuration).close()
        return True

    def _remaining(self, item: pytest.Item) -> list[pytest.Item]:
        """Returns the cases that come after `item` in its configuration."""
        cases = self._cases[_configuration(item)]
        return cases[cases.index(item) + 1 :]

    def _reports(self, item: pytest.Item) -> list[pytest.TestReport]:
        configuration = _configuration(item)
        if configuration in self._refused:
            text = f"Not run, since {self._refused[configuration]}"
            return [crashed(item, text, "setup", 0.0)]
        began = time.monotonic()
        try:
            return merged(self._config, self._running[configuration].results(item.nodeid))
        except Crashed as crash:
            self._stop(configuration)
            if not crash.came_up:
                self._refused[configuration] = "not every rank came to a first case"
            elif self._launches[configuration] == MOST_LAUNCHES:
                self._refused[configuration] = f"{MOST_LAUNCHES} launches have crashed"
            return [crashed(item, str(crash), "call", time.monotonic() - began)]

    def _start_what_fits(self, running: int) -> None:
        """Starts launches to come that have room with so many processes and the launches."""
        running += sum(c.ranks for c, launch in self._running.items() if launch.is_running())
        for configuration, cases in self._cases.items():
            fits = running + configuration.ranks <= MOST_PROCESSES
            if fits and configuration not in self._launches:
                self._start(configuration, cases)
                running += configuration.ranks

    def _start(self, configuration: Configuration, cases: list[pytest.Item]) -> None:
        self._launches[configuration] = self._launches.get(configuration, 0) + 1
        if self._config.get_verbosity() >= 0:
            number = list(self._cases).index(configuration) + 1
            self._say(
                f"launching {configuration} ({number} of {len(self._cases)}): {len(cases)} cases"
            )
        self._running[configuration] = Launch(
            configuration,
            [case.nodeid for case in cases],
            self._config.rootpath,
            ["--tier", self._config.option.tier, f"--hypothesis-seed={self._seed(configuration)}"],
        )

    def _say(self, line: str) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(line)

    def _seed(self, configuration: Configuration) -> int:
        given = self._config.getoption("--hypothesis-seed", None)
        if given:
            return int(given)
        seed = int(os.environ.get("COLLECTIVE_TEST_SEED") or 1)
        # so many configurations may well draw other examples, the same ones each time
        return seed + (
            list(self._cases).index(configuration) if self._config.option.tier == "all" else 0
        )

    def pytest_sessionfinish(self) -> None:
        for configuration in [*self._running]:  # it was interrupted, or had a failure under -x
            self._stop(configuration)

    def _stop(self, configuration: Configuration) -> None:
        launch = self._running.pop(configuration)
        launch.stop()
        launch.discard()
