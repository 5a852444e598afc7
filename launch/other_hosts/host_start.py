"""Starts a job on its hosts from one of them: over ssh it runs a launcher on each of the others.

    here:  ssh h2 'cd FOLDER && exec PYTHON -m collective.launch.started_host'
               stdin ◀── the job's secret, the environment, where to come to, the command line
    on h2: reads that, comes to the launcher here (started_host.py), does as told (host_agent.py)

Nothing secret stands in a command line. Over ssh nothing else goes: output, signals and the end of
the job have the connection between launchers. BatchMode keeps ssh from asking anybody; keys of
hosts are checked as ssh's own configuration says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from collective.job.progress_board import nameless_file
from collective.job.secret import FILE_VARIABLE, VARIABLE
from collective.launch.command_line.host_options import SshOptions
from collective.launch.connection.ssh import command_on_host, explanation

_FAREWELL_SECONDS = 5.0
_SHOWN_LINES = 5

# What tells of this host, or of this login, and not of the job.
_OWN_NAMES = frozenset(
    {
        *("_", "COLUMNS", "DISPLAY", "HOME", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD"),
        *("SHELL", "SHLVL", "TERM", "TMPDIR", "USER", "LINES"),
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NODE_RANK", VARIABLE, FILE_VARIABLE),
    }
)
_OWN_PREFIXES = ("SSH_", "XDG_", "DBUS_", "KUBERNETES_", "PET_", "SLURM_", "OMPI_", "PMI_", "PMIX_")


class HostStarter:
    """Starts the launchers of other hosts, and knows of those that have failed."""

    def __init__(self, ssh: SshOptions, python: str = sys.executable) -> None:
        """Starts nothing yet.

        Args:
          ssh: how to call it.
          python: the interpreter, by the same path on every host.
        """
        self._ssh = ssh
        self._python = python
        self._started: list[tuple[str, subprocess.Popen[bytes], IO[bytes]]] = []

    def start(self, host: str, instructions: Mapping[str, Any]) -> None:
        """Starts the launcher of a host.

        Args:
          host: its name or address.
          instructions: what it reads from its stdin.

        Raises:
          UsageError: there is no ssh here.
        """
        module = (self._python, "-m", "collective.launch.started_host")
        command = command_on_host(host, module, self._ssh)
        stdin = nameless_file("collective.instructions")
        with os.fdopen(stdin, "w+b") as file:
            file.write(json.dumps(instructions).encode())
            file.seek(0)
            errors = tempfile.TemporaryFile()
            process = subprocess.Popen(
                command,
                stdin=file,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is the launcher's
            )
        self._started.append((host, process, errors))

    def problem(self) -> str:
        """Returns why a host can't take part, "" as long as all may."""
        for host, process, errors in self._started:
            code = process.poll()
            if code is not None:
                errors.seek(0)
                lines = errors.read(1 << 16).decode("utf-8", "replace").strip().splitlines()
                return f"host {host}: {self._explanation(host, code, lines)}"
        return ""

    def end(self) -> None:
        """Waits for launchers that are done, and ends those that aren't."""
        end = time.monotonic() + _FAREWELL_SECONDS
        for _, process, errors in self._started:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            errors.close()
        self._started = []

    def _explanation(self, host: str, code: int, lines: Sequence[str]) -> str:
        known = explanation(host, code, lines, self._python)
        if known:
            return known
        shown = "".join(f"\n    {line}" for line in lines[-_SHOWN_LINES:])
        return f"its launcher has ended with exit code {code}:{shown or ' it says nothing'}"


def passed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that other hosts get: all but those of this host and this login."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _OWN_NAMES and not name.startswith(_OWN_PREFIXES)
    }
