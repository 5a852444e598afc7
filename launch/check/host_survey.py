"""Asks all hosts of a job at the same time for their facts (host_facts.py), with a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from collective.job.errors import UsageError
from collective.job.network import address_of_interface, is_this_host, resolve, source_address
from collective.launch.check.host_facts import MARK, HostFacts, Question, listener_at
from collective.launch.command_line.host_options import SshOptions
from collective.launch.connection.ssh import command_on_host, explanation

_MOST_AT_A_TIME = 256
_MOST_LINES = 1000  # that a login shell may write
_MOST_BYTES = 1 << 20  # of a line


@dataclass(frozen=True)
class Answer:
    """Holds a host's answer.

    Attributes:
        name: the name by which it was asked.
        facts: None if the host told none.
        problem: why it told none, and what helps.
        addresses: the addresses to which its name resolves here.
        clock_offset: how many seconds its clock is ahead of this host's; 0 if the difference may be
            due to the time that the question took.
        unreachable: the reasons why it can't reach other hosts, by their names.
    """

    name: str
    facts: HostFacts | None = None
    problem: str = ""
    addresses: Sequence[str] = ()
    clock_offset: float = 0.0
    unreachable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Survey:
    """Holds the answers of all hosts.

    Attributes:
        answers: in the order of the hosts.
        address: this host's address for connections from the others; "" if none could be found.
        problem: why none could be found.
    """

    answers: Sequence[Answer]
    address: str
    problem: str = ""


def survey(
    names: Sequence[str],
    ssh: SshOptions,
    interface: str | None,
    files: Sequence[str],
    seconds: float,
    python: str = sys.executable,
) -> Survey:
    """Asks all hosts.

    Args:
        names: the names of the hosts; this host may be one of them.
        ssh: how to reach the hosts.
        interface: the interface by which others reach this host, None to find it.
        files: the files that each host needs.
        seconds: how long each host may take to answer.
        python: the path of the interpreter, the same on every host.
    """
    with ThreadPoolExecutor(min(len(names), _MOST_AT_A_TIME)) as pool:
        addresses = list(pool.map(_addresses, names))
        address, problem = _own_address(names, addresses, interface)
        with listener_at(address) as listener:
            port = listener.getsockname()[1] if address else 0
            question = Question(address, port, tuple(files), seconds)
            asked = [_AskedHost(name, ssh, python, seconds) for name in names]
            try:
                answers = list(pool.map(lambda host: host.ask(question), asked))
                peers = [
                    (answer.name, answer.facts.address, answer.facts.port)
                    for answer in answers
                    if answer.facts is not None and answer.facts.port
                ]
                unreachable = list(pool.map(lambda host: host.meet(peers), asked))
            finally:
                for host in asked:
                    host.end()
    return Survey(
        [
            Answer(each.name, each.facts, each.problem, found, each.clock_offset, lost)
            for each, found, lost in zip(answers, addresses, unreachable)
        ],
        address,
        problem,
    )


class _AskedHost:
    """Runs host_facts.py on a host, and talks to the program."""

    def __init__(self, name: str, ssh: SshOptions, python: str, seconds: float) -> None:
        self._name, self._ssh, self._python, self._seconds = name, ssh, python, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()
        self._too_late = False

    def ask(self, question: Question) -> Answer:
        """Returns the host's answer."""
        module = (self._python, "-m", "collective.launch.check.host_facts")
        try:
            command = command_on_host(self._name, module, self._ssh)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
        except (UsageError, OSError) as error:
            return Answer(self._name, problem=str(error))
        start = time.time()
        told = self._exchange(asdict(question))
        end = time.time()
        if told is None:
            return Answer(self._name, problem=self._explanation())
        try:
            facts = HostFacts(**told)
            # The host has read its clock between these two times.
            offset = facts.clock - min(max(facts.clock, start), end)
        except TypeError:
            problem = "another version of this package answers there: install the same on all"
            return Answer(self._name, problem=problem)
        return Answer(self._name, facts, clock_offset=offset)

    def meet(self, peers: Sequence[tuple[str, str, int]]) -> dict[str, str]:
        """Returns which of the other hosts it can't reach, and why."""
        others = [peer for peer in peers if peer[0] != self._name]
        if not others or self._process is None:
            return {}
        lost = self._exchange(others)
        if lost is None:
            return {name: f"it did not say so within {self._seconds:g} s" for name, _, _ in others}
        return lost

    def end(self) -> None:
        """Ends the program if it still runs."""
        process = self._process
        if process is not None:
            for stream in (process.stdin, process.stdout):
                try:
                    if stream is not None:
                        stream.close()
                except OSError:
                    pass
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                _kill(process)
                process.wait()
        self._errors.close()

    def _exchange(self, words: object) -> dict[str, Any] | None:
        """Sends a line and returns the answer; None if no answer comes in time."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        timer = threading.Timer(self._seconds, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(json.dumps(words).encode() + b"\n")
            process.stdin.flush()
            for _ in range(_MOST_LINES):
                line = process.stdout.readline(_MOST_BYTES)
                if not line:
                    break
                if line.startswith(MARK.encode()):
                    answer = json.loads(line[len(MARK) :])
                    return answer if isinstance(answer, dict) else None
        except (OSError, ValueError):
            pass
        finally:
            timer.cancel()
        return None

    def _give_up(self) -> None:
        self._too_late = True
        if self._process is not None:
            _kill(self._process)

    def _explanation(self) -> str:
        assert self._process is not None
        if self._too_late:
            return f"it did not answer within {self._seconds:g} s: try `ssh {self._name} true`"
        try:
            code = self._process.wait(self._seconds)
        except subprocess.TimeoutExpired:
            return "it answers with what is no fact"
        self._errors.seek(0)
        lines = self._errors.read(1 << 16).decode("utf-8", "replace").strip().splitlines()
        known = explanation(self._name, code, lines, self._python)
        return known or f"exit code {code}: {lines[-1] if lines else 'it says nothing'}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a program and its children: they, too, hold the pipe that is being read."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _addresses(name: str) -> list[str]:
    try:
        return resolve(name, "-H")
    except UsageError:
        return []


def _own_address(
    names: Sequence[str], addresses: Sequence[Sequence[str]], interface: str | None
) -> tuple[str, str]:
    """Returns the address by which the others reach this host, and why there is none."""
    if interface is not None:
        try:
            return address_of_interface(interface), ""
        except UsageError as error:
            return "", str(error)
    problem = ""
    for name, found in zip(names, addresses):
        if not found or is_this_host(name):
            continue
        try:
            return source_address(found[0]), ""
        except OSError as error:
            problem = f"no way leads from here to {name} ({', '.join(found)}): {error.strerror}"
    return "", problem
