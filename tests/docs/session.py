"""Runs a page: its files are saved, its commands and its Python run, in the page's order.

page ──► blocks ──► file    written to the page's folder
               ├──► sh      bash, in that folder
               ├──► python  two ranks that stay, which all pieces of a page share
               └──► text    held against what the block before it printed
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from tests.docs.blocks import Block, PageError, missing_output

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
# What the tests' own process was told isn't meant for what a page starts.
_OWN = ("COLLECTIVE_", "HOROVOD_", "PYTEST_", "TF_CONFIG")


class Session:
    """Runs the blocks of one page in a folder of its own."""

    def __init__(self, page: str, folder: Path):
        """Prepares a folder.

        Args:
            page: the page's path in the repository.
            folder: is empty.
        """
        self._page = page
        self.folder = folder / "work"
        self._outside = folder / "outside"
        self.folder.mkdir()
        self._outside.mkdir()
        self._ranks: Ranks | None = None
        self._environment = environment(self._outside)

    def run(self, blocks: Iterable[Block]) -> None:
        """Runs a page.

        Raises:
            PageError: a block fails, or doesn't print what the page says.
        """
        output: str | None = None
        try:
            for block in blocks:
                if block.kind == "file":
                    (self.folder / block.note).write_text(block.code, encoding="utf-8")
                elif block.kind == "sh":
                    output = self._run_commands(block)
                elif block.kind == "python":
                    output = self._run_python(block)
                elif block.kind == "text":
                    self._compare(block, output)
                else:
                    output = None
        finally:
            if self._ranks is not None:
                self._ranks.close()

    def _run_commands(self, block: Block) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.code],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        if done.returncode:
            raise self._error(block, f"exit code {done.returncode}\n{done.stdout}")
        return done.stdout

    def _run_python(self, block: Block) -> str:
        if self._ranks is None:
            self._ranks = Ranks(self.folder, self._outside, self._environment)
        answers = self._ranks.run(block.code, f"{self._page}, line {block.line}")
        for rank, answer in enumerate(answers):
            last = (answer["error"].splitlines() or [""])[-1]
            raised = last.partition(":")[0].rpartition(".")[2]
            if raised != block.note:
                expected = f" instead of {block.note}" if block.note else ""
                what = answer["error"] or "no error\n"
                raise self._error(block, f"rank {rank}{expected}: {what}{self._ranks.log()}")
        return "".join(answer["output"] for answer in answers)

    def _compare(self, block: Block, output: str | None) -> None:
        if output is None:
            raise self._error(block, "no block that is run stands before this output")
        missing = missing_output(block.code, output)
        if missing:
            lines = "\n".join(missing)
            raise self._error(block, f"isn't printed:\n{lines}\n\nwhat is printed:\n{output}")

    def _error(self, block: Block, what: str) -> PageError:
        code = textwrap.indent(block.code, "    ")
        return PageError(f"{self._page}, line {block.line}, {block.kind}:\n{code}\n{what}")


class Ranks:
    """A launch whose ranks run what they are given, until it is closed."""

    def __init__(self, folder: Path, outside: Path, environment: dict[str, str]):
        self._log = outside / "ranks.log"
        pipes = [(outside / f"asked.{rank}", outside / f"told.{rank}") for rank in range(RANKS)]
        for pair in pipes:
            for pipe in pair:
                os.mkfifo(pipe)
        program = ROOT / "tests" / "docs" / "on_ranks.py"
        with open(self._log, "w") as log:
            self._launch = subprocess.Popen(
                [sys.executable, "-m", "collective", "launch", "-np", str(RANKS), program, outside],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        # For reading and writing: so that no rank which fails at its start leaves this waiting.
        self._asked = [_both_ways(asked) for asked, _ in pipes]
        self._told = [_both_ways(told) for _, told in pipes]

    def run(self, code: str, name: str) -> list[dict[str, str]]:
        """Runs a piece on all ranks at once; returns their answers."""
        line = json.dumps({"code": code, "name": name}) + "\n"
        for asked in self._asked:
            asked.write(line.encode())
            asked.flush()
        return [self._answer(told) for told in self._told]

    def _answer(self, told: IO[bytes]) -> dict[str, str]:
        line = b""
        while not line.endswith(b"\n"):
            if select.select([told], [], [], 1)[0]:
                line += told.read(1 << 16)
            elif self._launch.poll() is not None:
                raise PageError(f"the ranks have ended:\n{self.log()}")
        answer: dict[str, str] = json.loads(line)
        return answer

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        for pipe in (*self._asked, *self._told):
            pipe.close()
        try:
            self._launch.wait(timeout=60)
        finally:
            if self._launch.poll() is None:
                self._launch.terminate()
                self._launch.wait(timeout=60)


def _both_ways(pipe: Path) -> IO[bytes]:
    return os.fdopen(os.open(pipe, os.O_RDWR), "rb+", buffering=0)


def environment(outside: Path) -> dict[str, str]:
    """Returns the variables of a shell in which `collective` and `python` are this checkout's."""
    programs = outside / "bin"
    programs.mkdir()
    for name, program in (("collective", "-m collective"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {program} "$@"\n')
        (programs / name).chmod(0o755)
    kept = {name: x for name, x in os.environ.items() if not name.startswith(_OWN)}
    path = f"{programs}:{Path(sys.executable).parent}:{kept.get('PATH', '')}"
    return {
        **kept,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "HOME": str(outside),
    }
