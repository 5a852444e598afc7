"""One launch of resident ranks, as the process sees it that collected the cases."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.rank_plugin.configuration import Configuration
from tests.rank_plugin.inside import FOLDER

# A rank ends itself when a case takes so long: with other work, the largest of the random models
# take two minutes. (A thread ends also what hangs in C++.)
CASE_TIMEOUT = 240
# Only where even that doesn't happen: starting all ranks takes less, on a slow day.
SILENCE = 300
# How much of the ranks' output a crash shows.
OUTPUT = 60_000


class Crashed(Exception):
    """The launch has ended, or was ended, before the case had.

    Attributes:
        came_up: every rank had come to a first case.
    """

    def __init__(self, text: str, came_up: bool):
        super().__init__(text)
        self.came_up = came_up


@dataclass(frozen=True)
class Result:
    """Says what became of a case on one rank.

    Attributes:
        phases: the serialized reports of its set-up, call and teardown.
        output: what the rank printed meanwhile, if any of them failed on any rank.
    """

    phases: list[dict[str, Any]]
    output: str = ""


class Launch:
    """Ranks that run `cases` one after the other, and tell what becomes of each."""

    def __init__(
        self,
        configuration: Configuration,
        cases: Sequence[str],
        folder: Path,
        options: Sequence[str],
    ):
        self.configuration = configuration
        self._folder = Path(tempfile.mkdtemp(prefix="collective-ranks-"))
        (self._folder / "cases").write_text("".join(f"{case}\n" for case in cases), "utf-8")
        self._readers = [_Reader(self._folder, rank) for rank in range(configuration.ranks)]
        files = dict.fromkeys(case.partition("::")[0] for case in cases)
        with open(self._folder / "output", "wb") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "collective.launch"),
                    *("-np", str(configuration.ranks)),
                    *("--device", "gpu" if configuration.gpu else "cpu"),
                    *("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"),
                    *("--timeout", str(CASE_TIMEOUT), "--timeout-method", "thread"),
                    *options,
                    *files,
                ],
                cwd=folder,
                env={
                    **os.environ,
                    **configuration.environment(),
                    FOLDER: str(self._folder),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def results(self, case: str) -> list[Result]:
        """Waits until every rank is through with `case`; what became of it on each.

        Raises:
            Crashed: that will not happen.
        """
        heard = time.monotonic()
        while not all(case in reader.results for reader in self._readers):
            ended = self._process.poll() is not None
            # what was written before the end is read after it was seen
            if sum(reader.read() for reader in self._readers):
                heard = time.monotonic()
            elif ended:
                raise self._crash(case, f"ended with exit code {self._process.returncode}")
            elif time.monotonic() - heard > SILENCE:
                self.stop()
                raise self._crash(case, f"was ended: no rank said anything for {SILENCE} s")
            else:
                time.sleep(0.02)
        ran = [reader.results.pop(case) for reader in self._readers]
        failed = any(phase["outcome"] == "failed" for one in ran for phase in one.phases)
        return [
            Result(one.phases, reader.output(*one.printed) if failed else "")
            for one, reader in zip(ran, self._readers)
        ]

    def _crash(self, case: str, how: str) -> Crashed:
        started = [rank for rank, reader in enumerate(self._readers) if reader.case == case]
        where = f"in this case, on rank {', '.join(map(str, started))}" if started else "before it"
        launcher = (self._folder / "output").read_bytes()
        outputs = {"the launcher": launcher.decode(errors="replace")}
        for rank, reader in enumerate(self._readers):
            outputs[f"rank {rank}"] = reader.output(reader.began)
        text = f"The launch of {self.configuration} {how}, {where}."
        for who, output in outputs.items():
            text += f"\n--- output of {who} ---\n{_end_of(output).rstrip()}"
        return Crashed(text, all(reader.came_up for reader in self._readers))

    def stop(self) -> None:
        """Ends the ranks, if they have not ended, and waits for that."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def close(self) -> None:
        """Waits for the ranks to leave by themselves, which they are about to, and cleans up."""
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            pass
        self.stop()
        self.discard()

    def discard(self) -> None:
        """Removes the folder of a launch that has ended."""
        for reader in self._readers:
            reader.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Ran(NamedTuple):
    phases: list[dict[str, Any]]
    printed: tuple[int, int]  # from which byte of the rank's output to which


class _Reader:
    """What one rank reports and prints, as it comes."""

    def __init__(self, folder: Path, rank: int):
        self._reports, self._output = folder / f"reports.{rank}", folder / f"output.{rank}"
        self._file: Any = None
        self._rest = b""
        self._phases: list[dict[str, Any]] = []
        self.came_up = False
        self.case: str | None = None  # the one that runs
        self.began = 0  # where its output does
        self.results: dict[str, _Ran] = {}

    def read(self) -> int:
        """Takes in what is new; how many lines."""
        if self._file is None:
            try:
                self._file = open(self._reports, "rb")
            except FileNotFoundError:
                return 0
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["event"] == "started":
                self.came_up = True
                self.case, self.began, self._phases = event["case"], event["at"], []
            elif event["event"] == "report":
                self._phases.append(event["report"])
            else:
                self.results[event["case"]] = _Ran(self._phases, (self.began, event["at"]))
                self.case, self.began = None, event["at"]
        return len(lines)

    def output(self, first: int, last: int | None = None) -> str:
        """Returns what the rank printed from one byte to another."""
        try:
            data = self._output.read_bytes()
        except FileNotFoundError:
            return ""
        return data[first:last].decode(errors="replace")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _end_of(text: str) -> str:
    return text if len(text) <= OUTPUT else f"…{text[-OUTPUT:]}"
