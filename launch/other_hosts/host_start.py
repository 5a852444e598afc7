"""Starts a job's other hosts from this one: it runs a launcher on each of them over ssh.

    here:  ssh h2 'cd FOLDER && exec PYTHON -m collective.launch.started_host'
               stdin ◀── the job's secret, the environment, this host's address, the command line
    on h2: reads that, connects to the launcher here (started_host.py), does as told (host_agent.py)

No command line contains a secret. Nothing else goes over ssh: output, signals and the end of the
job use the connection between the launchers. BatchMode keeps ssh from prompting; ssh checks host
keys as its configuration says.
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

from collective.job.nameless_memory import nameless_file
from collective.job.secret import FILE_VARIABLE, VARIABLE
from collective.launch.command_line.host_options import SshOptions
from collective.launch.connection.ssh import command_on_host, explanation

_FAREWELL_SECONDS = 5.0
_SHOWN_LINES = 5

# Variables that describe this host or this login, not the job.
_OWN_NAMES = frozenset(
    {
        *("_", "COLUMNS", "DISPLAY", "HOME", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD"),
        *("SHELL", "SHLVL", "TERM", "TMPDIR", "USER", "LINES"),
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NODE_RANK", VARIABLE, FILE_VARIABLE),
    }
)
_OWN_PREFIXES = ("SSH_", "XDG_", "DBUS_", "KUBERNETES_", "PET_", "SLURM_", "OMPI_", "PMI_", "PMIX_")


class HostStarter:
    """Starts the launchers of other hosts, and reports those that have failed."""

    def __init__(self, ssh: SshOptions, python: str = sys.executable) -> None:
        """Starts nothing yet.

        Args:
            ssh: how to call ssh.
            python: the path of the interpreter, the same on every host.
        """
        self._ssh = ssh
        self._python = python
        self._started: list[tuple[str, subprocess.Popen[bytes], IO[bytes]]] = []

    def start(self, host: str, instructions: Mapping[str, Any]) -> None:
        """Starts the launcher of a host.

        Args:
            host: the host's name or address.
            instructions: what the launcher reads from its stdin.

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
                start_new_session=True,  # Ctrl-C goes to the launcher only
            )
        self._started.append((host, process, errors))

    def problem(self) -> str:
        """Returns why a host can't take part; "" while no host has failed."""
        for host, process, errors in self._started:
            code = process.poll()
            if code is not None:
                errors.seek(0)
                lines = errors.read(1 << 16).decode("utf-8", "replace").strip().splitlines()
                return f"host {host}: {self._explanation(host, code, lines)}"
        return ""

    def end(self) -> None:
        """Waits for launchers that are done, and ends the others."""
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
    """Returns the variables for other hosts: all except those of this host and this login."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _OWN_NAMES and not name.startswith(_OWN_PREFIXES)
    }
