"""True ssh servers on hosts of network namespaces, and an ssh that knows their keys.

All files are in the test's folder: nothing of the machine's own ssh, or of root's, is read.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.jobs.hosts.network import Network

_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/bin"])
_START_SECONDS = 20.0

_SERVER = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/client.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
PidFile none
SetEnv {variables}
"""

_CLIENT = """
Host *
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    IdentitiesOnly yes
    IdentityFile {folder}/client
"""


def why_not() -> str:
    """Returns why there can be no ssh server here; "" if there can."""
    for program in ("ssh", "sshd", "ssh-keygen"):
        if shutil.which(program, path=_PATH) is None:
            return f"there is no {program} (Debian: openssh-server, openssh-client)"
    return ""


class SshServers:
    """Runs ssh servers."""

    def __init__(self, network: Network, folder: Path, variables: Mapping[str, str]) -> None:
        """Starts none yet.

        Args:
          network: its hosts have been made.
          folder: of these servers alone.
          variables: that sessions have.
        """
        self._network, self._folder = network, folder
        self._servers: list[subprocess.Popen[bytes]] = []
        folder.mkdir()
        for key in ("host_key", "client", "stranger"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(command, check=True)
        words = " ".join(f'"{name}={value}"' for name, value in variables.items())
        (folder / "server").write_text(_SERVER.format(folder=folder, variables=words))
        (folder / "configuration").write_text(_CLIENT.format(folder=folder))
        programs = folder / "programs"
        programs.mkdir()
        true_ssh = shutil.which("ssh", path=_PATH)
        (programs / "ssh").write_text(
            f'#!/bin/sh\nexec {true_ssh} -F {folder}/configuration "$@"\n'
        )
        (programs / "ssh").chmod(0o755)
        self.environment = {"PATH": f"{programs}{os.pathsep}{_PATH}"}

    def start(self, *names: str, known: bool = True, refuse: bool = False) -> None:
        """Starts servers.

        Args:
          names: of the hosts.
          known: whether their keys are known to who comes.
          refuse: whether they let nobody in.
        """
        key = (self._folder / "host_key.pub").read_text().split(" ")[:2]
        for name in names:
            refusal = ["-o", "AuthorizedKeysFile=none"] if refuse else []
            server = f"exec {shutil.which('sshd', path=_PATH)} -D -e -f"
            words = [f'mkdir -p /run/sshd && {server} {self._folder}/server "$@"', "sshd"]
            with open(self._folder / f"{name}.log", "wb") as log:
                self._servers.append(
                    subprocess.Popen(
                        [*self._network.on_host(name), "sh", "-c", *words, *refusal],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
            if known:
                with open(self._folder / "known_hosts", "a") as file:
                    file.write(" ".join([self._network.address(name), *key]) + "\n")
        for name in names:
            self._wait(name)

    def stop(self) -> None:
        """Ends all servers."""
        for server in self._servers:
            server.terminate()
            server.wait(20)
        self._servers = []

    def _wait(self, name: str) -> None:
        log = self._folder / f"{name}.log"
        end = time.monotonic() + _START_SECONDS
        while "Server listening" not in log.read_text():
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.02)
