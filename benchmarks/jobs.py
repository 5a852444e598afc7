"""Starts a benchmark's program on every rank and reads the measurements that the ranks write.

A program is a script that is called with its name and a folder, `script.py NAME FOLDER …`, and ends
with `write_measurements`. A checkout is the folder that holds the package `collective`: the same
program can be run on several checkouts in turn, which is how two states of the code are compared on
a machine whose speed changes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

CHECKOUT = Path(__file__).resolve().parents[1]
# glibc gives large blocks back to the system after each step, and the next step faults their pages
# in again. With these variables it keeps them.
ALLOCATORS: dict[str, dict[str, str]] = {
    "default": {},
    "retain": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
        "MALLOC_TOP_PAD_": str(64 << 20),
    },
}
LOG_TAIL = 6000  # characters of a failed job's output that are shown


class Hosts(Protocol):
    """Runs commands on hosts."""

    names: list[str]

    def on_host(self, name: str) -> list[str]:
        """Returns the words that run the command that follows them on a host."""

    def options_of(self, name: str) -> list[str]:
        """Returns the launcher's options on a host."""


def environment_of(library: Path) -> dict[str, str]:
    """Returns the environment in which Python imports `collective` from a checkout."""
    paths = filter(None, [str(library), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run(
    script: Path,
    name: str,
    folder: Path,
    *,
    ranks: int,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    library: Path = CHECKOUT,
    timeout: float = 600.0,
    hosts: Hosts | None = None,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Runs a program on all ranks, with one intra-op thread each, and returns their measurements.

    Args:
        script: the program's file.
        name: its first argument.
        folder: its second argument; for its data, its log and its measurements.
        ranks: how many to start.
        arguments: further arguments.
        environment: variables to set besides.
        library: the checkout to run on.
        timeout: seconds.
        hosts: on which the ranks are, as many on each; by default they are here.
        device: the launcher's --device.

    Raises:
        SystemExit: the job failed, or took too long.
    """
    for old in folder.glob(f"{name}.*.json"):
        old.unlink()
    launch = [sys.executable, "-m", "collective.launch"]
    job = ["--device", device, str(script), name, str(folder), *arguments]
    commands = [[*launch, "-np", str(ranks), *job]]
    if hosts is not None:
        here = ["-np", str(ranks // len(hosts.names)), *job]
        commands = [
            [*hosts.on_host(host), *launch, *hosts.options_of(host), *here] for host in hosts.names
        ]
    variables = {
        **environment_of(library),
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        # Its copies have nothing to do with each other.
        **({"COLLECTIVE_INDEPENDENT": "1"} if name in ("plain", "plain_keras") else {}),
        **(environment or {}),
    }
    with open(folder / f"{name}.log", "w+") as log:
        # `python -m` looks in the current folder first, which must not be another checkout.
        launchers = [
            subprocess.Popen(
                command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            for command in commands
        ]
        try:
            codes = {launcher.wait(timeout) for launcher in launchers}
            ending = f"exit code {max(codes, key=abs)}"
        except subprocess.TimeoutExpired:
            ending = f"no result after {timeout:.0f} s (--timeout)"
        finally:  # After Ctrl-C, too: a launcher ends its ranks when it is told to end.
            for launcher in launchers:
                if launcher.poll() is None:
                    stop(launcher)
        log.seek(0)
        if ending != "exit code 0":
            sys.exit(f"{log.read()[-LOG_TAIL:]}\n{script.name}: {name} ended with {ending}")
    return _read_measurements(name, folder, ranks, library)


def stop(launcher: subprocess.Popen) -> None:
    """Ends a job, by force if need be: a launcher that is killed takes its ranks with it."""
    launcher.terminate()
    try:
        launcher.wait(30)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def exit_on_sigterm() -> None:
    """Turns SIGTERM into SystemExit, so that no rank and no temporary file is left."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def write_measurements(name: str, folder: Path, measurements: dict[str, Any]) -> None:
    """Writes a rank's measurements, with the checkout from which it took the library."""
    package = sys.modules.get("collective")
    library = package and str(Path(str(package.__file__)).resolve().parents[1])
    path = folder / f"{name}.{os.environ['RANK']}.json"
    path.write_text(json.dumps({**measurements, "library": library}))


def _read_measurements(name: str, folder: Path, ranks: int, library: Path) -> list[dict[str, Any]]:
    measurements = []
    for rank in range(ranks):
        measured = json.loads((folder / f"{name}.{rank}.json").read_text())
        imported_from = measured.pop("library")
        if imported_from not in (None, str(library)):
            sys.exit(f"{name} imported collective from {imported_from}, not from {library}")
        measurements.append(measured)
    return measurements
