"""Collects facts about a host, so that a job's hosts can be compared before the job starts.

    here:  ssh h2 'cd FOLDER && exec PYTHON -m collective.launch.check.host_facts'
               stdin ◀── the address to connect to, files to look for
               stdout ──▶ its facts, and the port on which it listens
               stdin ◀── where the other hosts listen
               stdout ──▶ which of them it can't reach

It imports no TensorFlow, and ends by itself.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import os
import platform
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from collective.job.errors import UsageError
from collective.job.gloo_address import addresses_of_name, library
from collective.job.machine import available_cores, shared_memory_bytes
from collective.job.network import addresses_by_interface, source_address
from collective.launch.planning.devices import driver_gpus, visible_gpus
from collective.version import __version__

MARK = "collective-host-facts "  # marks the answer; a login shell may write other lines
CONNECT_SECONDS = 3.0
_MOST_CONNECTIONS_AT_ONCE = 32
# The distributions that provide a package, by the package's name.
_DISTRIBUTIONS = {
    "TensorFlow": ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-gpu"),
    "Horovod": ("horovod",),
}


@dataclass(frozen=True)
class HostFacts:
    """Describes a host.

    Attributes:
        collective, python: versions.
        packages: the versions of TensorFlow and Horovod, "" for a package that isn't installed.
        cores, gpus: how many the host may use.
        open_files: how many files a process may open.
        shared_memory: the size of /dev/shm in bytes.
        interfaces: the host's addresses.
        host_name: the host's own name.
        name_addresses: the addresses to which that name resolves.
        has_address_library: whether ranks can be told where to listen.
        clock: seconds since the epoch.
        missing: the requested files that the host doesn't have.
        address: the host's address on the route to the asking host; "" if it can't connect, or
            wasn't told where to.
        unreachable: why it can't connect to the asking host.
        port: the port on which it listens at that address.
    """

    collective: str
    python: str
    packages: Mapping[str, str]
    cores: int
    gpus: int
    open_files: int
    shared_memory: int
    interfaces: Mapping[str, Sequence[str]]
    host_name: str
    name_addresses: Sequence[str]
    has_address_library: bool
    clock: float
    missing: Sequence[str] = ()
    address: str = ""
    unreachable: str = ""
    port: int = 0


@dataclass(frozen=True)
class Question:
    """Holds what a host is asked.

    Attributes:
        address, port: where the asking host listens; "" for nowhere.
        files: the files to look for.
        seconds: after how many seconds an answer comes too late.
    """

    address: str = ""
    port: int = 0
    files: Sequence[str] = field(default_factory=tuple)
    seconds: float = 60.0


def local_facts(question: Question = Question()) -> HostFacts:
    """Returns the facts about this host."""
    address, unreachable = "", ""
    if question.address:
        try:
            with socket.create_connection(
                (question.address, question.port), CONNECT_SECONDS
            ) as connection:
                address = str(connection.getsockname()[0])
        except OSError as error:
            unreachable = error.strerror or str(error)
            address = _source(question.address)
    name = socket.gethostname()
    return HostFacts(
        collective=__version__,
        python=platform.python_version(),
        packages={name: _version(names) for name, names in _DISTRIBUTIONS.items()},
        cores=available_cores(),
        gpus=_gpus(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shared_memory=shared_memory_bytes(),
        interfaces=addresses_by_interface(),
        host_name=name,
        name_addresses=addresses_of_name(name),
        has_address_library=bool(library()),
        missing=[path for path in question.files if not os.path.exists(path)],
        address=address,
        unreachable=unreachable,
        clock=time.time(),
    )


def unreachable_peers(peers: Sequence[tuple[str, str, int]]) -> dict[str, str]:
    """Tries to connect to hosts (name, address, port). Returns for each failure name and reason."""

    def reason(peer: tuple[str, str, int]) -> str:
        try:
            socket.create_connection((peer[1], peer[2]), CONNECT_SECONDS).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    with ThreadPoolExecutor(_MOST_CONNECTIONS_AT_ONCE) as pool:
        reasons = dict(zip([name for name, _, _ in peers], pool.map(reason, peers)))
    return {name: reason for name, reason in reasons.items() if reason}


def main() -> int:
    """Answers on stdout the question that comes on stdin."""
    try:
        question = Question(**json.loads(sys.stdin.readline()))
    except (ValueError, TypeError):
        print("collective launch: no question on stdin: --check -H asks it", file=sys.stderr)
        return 2
    signal.alarm(int(2 * question.seconds) + 1)  # by then the asking process is gone
    facts = asdict(local_facts(question))
    with listener_at(facts["address"]) as listener:
        facts["port"] = listener.getsockname()[1] if facts["address"] else 0
        _say(facts)
        line = sys.stdin.readline()
        if line:
            _say(unreachable_peers([tuple(peer) for peer in json.loads(line)]))
            sys.stdin.read()  # other hosts may still be connecting to this one
    return 0


def _say(answer: Mapping[str, Any]) -> None:
    print(MARK + json.dumps(answer), flush=True)


@contextlib.contextmanager
def listener_at(address: str) -> Iterator[socket.socket]:
    """Listens on a port that the system chooses; does nothing for the address "".

    Each connection is closed at once: that it was made is proof enough. The kernel queues only a
    few connections that nobody accepts (128 on old kernels), and a job may have more hosts.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        if not address:
            yield listener
            return
        listener.bind((address, 0))
        listener.listen(socket.SOMAXCONN)
        thread = threading.Thread(target=_send_away, args=(listener,), daemon=True)
        thread.start()
        try:
            yield listener
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            thread.join()


def _send_away(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno == errno.EINVAL:  # the socket was shut down
                return
            time.sleep(0.05)  # no descriptor is left, or the peer is gone again
        else:
            connection.close()


def _source(destination: str) -> str:
    try:
        return source_address(destination)
    except OSError:
        return ""


def _version(distributions: Sequence[str]) -> str:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _gpus() -> int:
    try:
        return len(visible_gpus(os.environ, driver_gpus()))
    except UsageError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
