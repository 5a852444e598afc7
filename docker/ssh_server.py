"""Runs the ssh server of a worker's container, by which a launcher elsewhere starts ranks in it.

It runs as the container's user. The host key is made at each start, and sessions have the
container's environment. TERM ends a container: the server first passes it on to the ranks, which
take it for a wish to save and stop, and ends when they and their sessions have ended. The sender
decides how long that may take.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

_SERVER = "/usr/sbin/sshd"
_CONFIGURATION = Path(__file__).with_name("sshd_config")
_LAUNCHED = b"COLLECTIVE_LAUNCHED=1"  # in the environment of ranks and of what they start
# A session has its own.
_OF_THE_SESSION = frozenset({"HOME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL", "USER"})
_LOOK_SECONDS = 0.1


def main() -> int:
    # Blocked, so that none is lost before it is waited for. The server gets it unblocked.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    with tempfile.TemporaryDirectory() as folder:
        configuration = Path(folder, "sshd_config")
        configuration.write_text(server_configuration(host_key(folder), os.environ))
        server = subprocess.Popen(
            [_SERVER, "-D", "-e", "-f", configuration],
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ()),
        )
        while server.poll() is None:
            if signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM:
                stop_ranks(server.pid)
                server.kill()
                server.wait()
                return 0
    return abs(server.returncode)


def host_key(folder: str) -> str:
    """Makes a key that identifies this server, and returns its file."""
    file = os.path.join(folder, "host_key")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file], check=True)
    return file


def server_configuration(key: str, environment: Mapping[str, str]) -> str:
    """Returns the server's configuration, with the environment that sessions are to have."""
    variables = [
        f'"{name}={value}"'
        for name, value in environment.items()
        # The server's configuration can't say these.
        if name not in _OF_THE_SESSION and not set('"\\\n\r') & set(name + value)
    ]
    lines = [f"HostKey {key}", *([f"SetEnv {' '.join(variables)}"] if variables else [])]
    return "\n".join([*lines, _CONFIGURATION.read_text(encoding="utf-8")])


def stop_ranks(server: int, proc: Path = Path("/proc")) -> None:
    """Tells the server's ranks to stop, and returns when they and their launchers have ended.

    Args:
        server: the ssh server's process, below which they are.
        proc: where processes are described.
    """
    ranks = [rank for rank in ranks_in(proc) if server in ancestors(rank, proc)]
    for rank in ranks:
        try:
            os.kill(rank, signal.SIGTERM)
        except ProcessLookupError:
            continue
    ending = set().union(*(ancestors(rank, proc) for rank in ranks))
    ending -= {server, *ancestors(os.getpid(), proc)}
    while any(Path(proc, str(process)).exists() for process in ending):
        time.sleep(_LOOK_SECONDS)


def ranks_in(proc: Path) -> Iterator[int]:
    """Yields the processes that a launcher started, without what they have started themselves."""
    for folder in proc.glob("[0-9]*"):
        parent = _parent(folder)
        if _is_launched(folder) and not _is_launched(Path(proc, str(parent))):
            yield int(folder.name)


def ancestors(process: int, proc: Path) -> set[int]:
    """Returns the processes above one, and itself."""
    above: set[int] = set()
    while process > 0 and process not in above:
        above.add(process)
        process = _parent(Path(proc, str(process)))
    return above


def _is_launched(folder: Path) -> bool:
    try:
        return _LAUNCHED in (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended, or is another user's


def _parent(folder: Path) -> int:
    try:
        lines = (folder / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("PPid:")), 0)


if __name__ == "__main__":
    sys.exit(main())
