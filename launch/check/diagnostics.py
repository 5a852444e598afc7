"""The report of `--check`: versions, resources, hosts, and how to get what is missing.

Another process imports TensorFlow, Horovod and CuPy: the import takes seconds, and a broken build
may crash.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collective.job.errors import UsageError
from collective.job.hosts import named_twice
from collective.job.machine import available_cores, memory_bytes, shared_memory_bytes
from collective.job.network import (
    address_of_interface,
    addresses_of_hosts,
    listening_address,
    resolve,
    source_address,
)
from collective.job.secret import VARIABLE, job_secret, missing_secret_file
from collective.launch.check.host_facts import CONNECT_SECONDS, HostFacts, local_facts
from collective.launch.check.host_findings import (
    Finding,
    describe,
    interface_with,
    ip_versions,
    network_text,
    of_host,
    of_hosts,
)
from collective.launch.check.host_survey import survey
from collective.launch.command_line.host_options import HostList, HostOptions
from collective.launch.planning.devices import NO_GPUS, driver_gpus, visible_gpus

_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 9), (3, 13)
_IMPORT_TIMEOUT = 180  # seconds

# This describes the package, not the machine: it says nothing about a GPU.
_TENSORFLOW = """
import tensorflow as module
facts = {"CUDA": "built with" + ("" if module.test.is_built_with_cuda() else "out") + " CUDA"}
"""
_HOROVOD = """
import horovod as module
import horovod.tensorflow as hvd
facts = {"gloo": hvd.gloo_built(), "nccl": bool(hvd.nccl_built()), "mpi": hvd.mpi_built()}
"""
# Packages of extras, and of a user's own environment; they are only checked if they are installed.
# A release whose NumPy or protobuf doesn't match fails at its import, or at its first use.
_OPTIONAL = {
    "pyarrow": ("import pyarrow.parquet; import pyarrow as module; facts = {}", "pyarrow>=14,<22"),
    "tensorflow_datasets": (
        "import tensorflow_datasets as module; module.core.BuilderConfig; facts = {}",
        "collective-strategy[datasets]",
    ),
}
_CUPY = "import cupy as module; facts = {}"
# Runs in the other process: the launcher itself imports nothing from the package.
_OPERATIONS = """
import types
import tensorflow
from collective.ops import native_library
from collective.ops.rows import keymap
keymap.check()
native_library.library()
module = types.SimpleNamespace(__version__="compiled for TensorFlow " + tensorflow.__version__)
facts = {}
"""
_REPORT = """
import json, sys
version = getattr(module, "__version__", "of unknown version")
json.dump({"version": version, **facts}, sys.__stdout__)
"""


@dataclass(frozen=True)
class CheckedJob:
    """Describes the job for which a machine is checked.

    Attributes:
        ranks: the number of ranks on this host; None means one per GPU.
        uses_gpus: whether the job may run on GPUs.
        files: the files that each host needs.
        hosts: says which of the job's hosts this is; None for a job of one host, or a job that is
            started from here.
        listed: the hosts on which the job is started from here.
        seconds: how long a host may take to answer.
    """

    ranks: int | None = None
    uses_gpus: bool = True
    files: Sequence[str] = ()
    hosts: HostOptions | None = None
    listed: HostList | None = None
    seconds: float = 30.0


def main(arguments: Sequence[str] | None = None, prog: str = "collective check") -> int:
    """Runs the check as a separate command, which takes no arguments."""
    description = "Says what is installed and what is missing; exits with 1 if nothing can train."
    argparse.ArgumentParser(prog=prog, description=description).parse_args(arguments)
    return check()


def check(job: CheckedJob = CheckedJob(), environment: Mapping[str, str] = os.environ) -> int:
    """Prints the report. Returns 0 if nothing prevents training on the CPU, else 1.

    Args:
        job: the job to check for; without hosts only the machine itself is checked.
        environment: the launcher's environment.
    """
    required: list[str] = []  # without these nothing trains
    recommended: list[str] = []  # without these something else doesn't work
    _check_python(required)
    gpus = _visible_gpus()
    _check_packages(required, recommended, bool(gpus))
    _show_machine(gpus)
    facts = local_facts()
    _show("open files", f"{facts.open_files} for each process")
    if job.listed is not None:
        findings = _check_listed(job, job.listed, facts)
    elif job.hosts is not None:
        findings = _check_membership(job, job.hosts, facts, environment)
    else:
        _show("network", f"{network_text(facts, '', '')}; {ip_versions(facts)}")
        findings = of_host(facts, "", job.ranks or 1, job.ranks, 1, job.uses_gpus)
    for sentence in required + recommended:
        print(f"missing: {sentence}")
    for finding in sorted(findings, key=lambda each: not each.is_obstacle):
        print(f"{'problem' if finding.is_obstacle else 'note'}: {finding.sentence}")
    obstacles = bool(required) or any(each.is_obstacle for each in findings)
    if not obstacles:
        several = job.listed is not None or job.hosts is not None
        print(f"Training on {'these hosts' if several else 'the CPU'} can start.")
    return 1 if obstacles else 0


def _check_listed(job: CheckedJob, listed: HostList, here: HostFacts) -> list[Finding]:
    """Asks all hosts of a job that is started from here."""
    ranks = dict(listed.hosts)
    found = survey(list(ranks), listed.ssh, listed.interface, job.files, job.seconds)
    own = {each for addresses in here.interfaces.values() for each in addresses}
    others = [each.name for each in found.answers if not own & set(each.addresses)]
    why = "by --network-interface" if listed.interface else f"the way to {', '.join(others[:1])}"
    _show("network", f"{network_text(here, found.address, why)}; {ip_versions(here)}")
    for answer in found.answers:
        _show(f"host {answer.name}", describe(answer))
    twice = named_twice(listed.hosts, addresses_of_hosts(list(ranks)))
    return ([Finding(twice)] if twice else []) + of_hosts(found, here, ranks, job.uses_gpus)


def _check_membership(
    job: CheckedJob, hosts: HostOptions, here: HostFacts, environment: Mapping[str, str]
) -> list[Finding]:
    """Checks this host as one host of a job that has a launcher started on each host."""
    own_ranks = job.ranks or (max(1, here.gpus) if job.uses_gpus else 1)
    findings = of_host(here, "", own_ranks * hosts.nodes, job.ranks, hosts.nodes, job.uses_gpus)
    address = ""
    try:
        if hosts.node == 0:
            address = listening_address(hosts.master, hosts.interface)
            findings += _check_port(address, hosts.port)
        else:
            found = resolve(hosts.master)
            findings += _check_way(found, hosts)
            own = hosts.interface
            address = address_of_interface(own) if own else source_address(found[0])
    except UsageError as error:
        findings.append(Finding(str(error)))
    except OSError as error:
        findings.append(
            Finding(f"there is no route to --master-addr {hosts.master}: {error.strerror}")
        )
    why = (
        "by --network-interface" if hosts.interface else f"the way of --master-addr {hosts.master}"
    )
    _show("network", f"{network_text(here, address, why)}; {ip_versions(here)}")
    if address and interface_with(here, address) == "lo":
        findings.append(
            Finding(
                f"--master-addr {hosts.master} is this host's loopback, {address}, which no other "
                "host reaches: give its address in the network, or --network-interface",
                is_obstacle=False,
            )
        )
    return findings + _check_secret(environment, hosts.secret_file)


def _check_secret(environment: Mapping[str, str], file: str | None) -> list[Finding]:
    path = missing_secret_file(environment, file)
    if path is not None:
        return [
            Finding(
                f"the job's secret {path} does not exist: the launcher makes one. Copy it to the "
                f"other hosts, unless they share the folder, or give all of them one {VARIABLE}",
                is_obstacle=False,
            )
        ]
    try:
        job_secret(environment, file)
    except UsageError as error:
        return [Finding(str(error))]
    return []


def _check_port(address: str, port: int) -> list[Finding]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address, port))
        except OSError as error:
            return [
                Finding(
                    f"--master-port {port} at {address} can't be listened at: {error.strerror}; if "
                    "another job has it, choose another for all hosts"
                )
            ]
    return []


def _check_way(addresses: Sequence[str], hosts: HostOptions) -> list[Finding]:
    """Tries to reach the first host. A host answers even if nobody listens on the port yet."""
    reason = ""
    for address in addresses:
        try:
            socket.create_connection((address, hosts.port), CONNECT_SECONDS).close()
            return []
        except ConnectionRefusedError:
            return []
        except OSError as error:
            reason = f"{address} port {hosts.port}: {error.strerror or error}"
    return [
        Finding(
            f"the first host, --master-addr {hosts.master}, doesn't answer: {reason}; it is down, "
            "or a firewall is between: open all ports between hosts"
        )
    ]


def _check_python(required: list[str]) -> None:
    _show("Python", f"{platform.python_version()} ({sys.executable})")
    if not _OLDEST_PYTHON <= sys.version_info[:2] <= _NEWEST_PYTHON:
        required.append("a Python from 3.9 to 3.13; `make setup` looks for the newest of them")


def _check_packages(required: list[str], recommended: list[str], has_gpus: bool) -> None:
    tensorflow, problem = _facts_of_import(_TENSORFLOW)
    _show("TensorFlow", _summary(tensorflow, problem))
    if problem:
        with_cuda = ", `make setup GPU=1` with CUDA" if has_gpus else ""
        required.append(f"TensorFlow; `make setup` installs it{with_cuda}")
    else:
        _check_operations(recommended)
    horovod, problem = _facts_of_import(_HOROVOD)
    _show("Horovod", _summary(horovod, problem))
    if problem or not horovod["gloo"]:
        recommended.append(
            "Horovod with Gloo, built against the installed TensorFlow, for ranks on several hosts "
            "and scripts that call it; `collective build-horovod` builds it, or `make setup` in a "
            "checkout"
        )
    elif has_gpus and not horovod["nccl"]:
        recommended.append(
            "Horovod with NCCL, for more than one GPU; "
            "`collective build-horovod --gpu` builds it, or `make setup GPU=1`"
        )
    _check_optional(recommended)
    cupy, problem = _facts_of_import(_CUPY)
    _show("CuPy", _summary(cupy, problem) + ("" if has_gpus else " (needed on GPUs only)"))
    if problem and has_gpus:
        recommended.append(
            "CuPy, for the kernels on GPUs; "
            "`pip install '.[gpu]'` or `make setup GPU=1` installs it"
        )


def _check_optional(recommended: list[str]) -> None:
    """Checks the optional packages that are installed."""
    for name, (source, requirement) in _OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            continue
        facts, problem = _facts_of_import(source)
        if problem:
            _show(name, _summary(facts, problem))
            recommended.append(
                f"a {name} that can be imported with the other packages here; "
                f"pip install '{requirement}' installs one"
            )


def _check_operations(recommended: list[str]) -> None:
    operations, problem = _facts_of_import(_OPERATIONS)
    _show("operations", _summary(operations, problem))
    if problem:
        recommended.append(
            "the compiled operations, without which steps are slower; "
            "`make setup` in a checkout builds them, or `pip install .`"
        )


def _show_machine(gpus: tuple[str, ...]) -> None:
    names = f" ({', '.join(gpus)})" if gpus else ""
    _show("GPUs", f"{len(gpus)} visible{names}, {len(driver_gpus())} reported by the driver")
    _show("cores", f"{available_cores()} available of {os.cpu_count()}")
    # CPU ranks share unnamed memory, which counts as memory; only NCCL and MPI use files.
    _show("memory", f"{_gibibytes(memory_bytes())}, what CPU ranks share included")
    _show("/dev/shm", f"{_gibibytes(shared_memory_bytes())}, for NCCL and MPI")


def _visible_gpus() -> tuple[str, ...]:
    try:
        return visible_gpus(os.environ, driver_gpus())
    except UsageError as error:
        _show("GPUs", str(error))
        return NO_GPUS


def _facts_of_import(source: str) -> tuple[dict[str, object], str]:
    """Imports a package in another process.

    Returns:
        The package's version and features, and "" if there is no problem; or nothing, and the
        reason why it can't be imported.
    """
    try:
        result = subprocess.run(
            [sys.executable, "-c", source + "\n" + _REPORT],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_IMPORT_TIMEOUT,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
    except subprocess.TimeoutExpired:
        return {}, f"its import takes more than {_IMPORT_TIMEOUT} s"
    if result.returncode < 0:
        return {}, f"its import crashes ({signal.Signals(-result.returncode).name})"
    if result.returncode:
        return {}, (result.stderr.strip().splitlines() or ["its import fails"])[-1]
    facts: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return facts, ""


def _summary(facts: dict[str, object], problem: str) -> str:
    if problem:
        return f"none: {problem}"
    features = [
        fact if isinstance(fact, str) else f"{name} {'yes' if fact else 'no'}"
        for name, fact in facts.items()
        if name != "version"
    ]
    suffix = f" ({', '.join(features)})" if features else ""
    return f"{facts['version']}{suffix}"


def _gibibytes(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _show(name: str, text: str) -> None:
    print(f"{name:<11} {text}", flush=True)
