"""The options and variables that describe a job's hosts, under torchrun's names.

An option overrides torchrun's variable (PET_NNODES), which overrides the plain one (NODE_RANK).
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collective.job.errors import UsageError
from collective.job.hosts import parse_hostfile, parse_hosts
from collective.job.schedulers import Membership, started_by
from collective.launch.command_line.durations import seconds

DEFAULT_PORT = 29500  # torchrun's
DEFAULT_START_TIMEOUT = 600.0
DEFAULT_HOST_TIMEOUT = 15.0
DEFAULT_HOSTFILE = "/etc/mpi/hostfile"  # where Kubeflow's MPI operator puts it
_MOST_HOSTFILE_CHARACTERS = 1 << 20
_MOST_NODES = 4096

# The variables to use if an option is missing; the first one that is set counts.
_VARIABLES = {
    "nodes": ("PET_NNODES",),
    "node": ("PET_NODE_RANK", "NODE_RANK"),
    "master": ("PET_MASTER_ADDR", "MASTER_ADDR"),
    "port": ("PET_MASTER_PORT", "MASTER_PORT"),
    "ranks": ("PET_NPROC_PER_NODE",),
}


@dataclass(frozen=True)
class HostOptions:
    """Says which of a job's hosts this is.

    Attributes:
        nodes: how many hosts there are.
        node: this host's number.
        master: the name or address of the first host.
        port: the port on which the first host waits for the others.
        interface: the interface that leads to the other hosts, None to find it.
        start_timeout: how many seconds hosts wait for each other at the start.
        host_timeout: after how many seconds of silence a host counts as lost.
        secret_file: the file with the job's secret, if one was named.
    """

    nodes: int
    node: int
    master: str
    port: int
    interface: str | None = None
    start_timeout: float = DEFAULT_START_TIMEOUT
    host_timeout: float = DEFAULT_HOST_TIMEOUT
    secret_file: str | None = None


@dataclass(frozen=True)
class SshOptions:
    """Says how to call ssh: its port and identity file, if given."""

    port: int | None = None
    identity_file: str | None = None


@dataclass(frozen=True)
class HostList:
    """Lists the hosts on which a job is to be started from here.

    Attributes:
        hosts: each host's name and number of ranks; None means one rank per GPU.
        interface: the interface that leads to the hosts, None to find it.
        start_timeout: how many seconds the hosts may take to connect.
        host_timeout: after how many seconds of silence a host counts as lost.
        ssh: how to reach the hosts.
    """

    hosts: tuple[tuple[str, int | None], ...]
    interface: str | None
    start_timeout: float
    host_timeout: float
    ssh: SshOptions


def host_list(options: argparse.Namespace, environment: Mapping[str, str]) -> HostList | None:
    """Returns the hosts of -H or of a host file; None if there is no list.

    With a list, -np is the number of all ranks, as in mpirun and horovodrun: hosts get their ranks
    in the list's order, and hosts that would get none are left out.

    Raises:
        UsageError: the list is unreadable, or contradicts other options.
    """
    flags = {"-H": options.hosts, "--hostfile": options.hostfile}
    given = [flag for flag, value in flags.items() if value is not None]
    if len(given) > 1:
        raise UsageError("-H and --hostfile both name the hosts: give one of them")
    if given and (options.nodes is not None or options.node is not None or options.standalone):
        raise UsageError(
            f"{given[0]} starts the launcher on all hosts; --nnodes, --node-rank and --standalone "
            "are for a launcher that was started on each"
        )
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    else:
        path = options.hostfile
        if path is None and not _decides_itself(options, environment):
            path = DEFAULT_HOSTFILE if os.path.isfile(DEFAULT_HOSTFILE) else None
        if path is None:
            return None
        hosts = parse_hostfile(_read(path), path)
    start_timeout, host_timeout = timeouts(options)
    return HostList(
        hosts=tuple(_share_out(hosts, options.ranks)),
        interface=options.interface,
        start_timeout=start_timeout,
        host_timeout=host_timeout,
        ssh=SshOptions(options.ssh_port, options.ssh_identity_file),
    )


def _decides_itself(options: argparse.Namespace, environment: Mapping[str, str]) -> bool:
    """Tells whether the options settle the hosts, so that the default host file is ignored."""
    # A rank may start a job of its own.
    in_rank = bool(environment.get("COLLECTIVE_LAUNCHED"))
    return options.standalone or host_count_is_given(options, environment) or in_rank


def host_count_is_given(options: argparse.Namespace, environment: Mapping[str, str]) -> bool:
    """Tells whether --nnodes, or the variable that replaces it, gives the number of hosts."""
    if options.nodes is None and options.standalone:
        return False
    return _given("--nnodes", options.nodes, "nodes", environment)[1] is not None


def launchers(options: argparse.Namespace, environment: Mapping[str, str]) -> int | None:
    """Returns on how many hosts a launcher is started, by --nnodes; None if that isn't given."""
    if options.standalone and options.nodes is None:
        return None
    text = _given("--nnodes", options.nodes, "nodes", environment)[1]
    return int(text) if text is not None and _is_number(text) and int(text) else None


def timeouts(options: argparse.Namespace) -> tuple[float, float]:
    """Returns --start-timeout and --host-timeout in seconds.

    Raises:
        UsageError: one of them isn't possible.
    """
    given = {"--start-timeout": options.start_timeout, "--host-timeout": options.host_timeout}
    for flag, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{flag} {value:g}: give a number of seconds, more than 0")
    start, silence = given.values()
    return (
        DEFAULT_START_TIMEOUT if start is None else start,
        DEFAULT_HOST_TIMEOUT if silence is None else silence,
    )


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_HOSTFILE_CHARACTERS)
    except OSError as error:
        raise UsageError(f"--hostfile {path} can't be read: {error.strerror}") from None


def _share_out(
    hosts: Sequence[tuple[str, int | None]], ranks: str | None
) -> list[tuple[str, int | None]]:
    """Returns the hosts with their ranks, which add up to -np."""
    known = [f"{name}:{slots}" for name, slots in hosts if slots is not None]
    if ranks in ("gpu", "cpu") and known:
        raise UsageError(
            f"-np {ranks} counts the ranks of each host, and the list says how many: {known[0]}; "
            f"leave one of them out, or give --device {ranks}"
        )
    if ranks is None or ranks in ("auto", "gpu", "cpu"):
        return list(hosts)
    if not _is_number(ranks):
        raise UsageError(f"-np {ranks}: give the number of all ranks, auto, gpu or cpu")
    unknown = [name for name, slots in hosts if slots is None]
    if unknown:
        raise UsageError(
            f"-np {ranks} is the number of all ranks, and host {unknown[0]} doesn't say how many "
            f"it takes: {unknown[0]}:N, or slots=N in a file"
        )
    left, total = int(ranks), sum(slots or 0 for _, slots in hosts)
    if not 1 <= left <= total:
        raise UsageError(f"-np {ranks}: the hosts have places for 1 to {total} ranks")
    shared: list[tuple[str, int | None]] = []
    for name, slots in hosts:
        taken = min(left, slots or 0)
        left -= taken
        if taken:
            shared.append((name, taken))
    return shared


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options as a group."""
    add = parser.add_argument_group("several hosts").add_argument
    add(
        "--nnodes",
        dest="nodes",
        metavar="M",
        help="how many hosts the job has; the launcher is started on each (default: $PET_NNODES, "
        "or 1)",
    )
    add(
        "--node-rank",
        "--node_rank",
        dest="node",
        type=int,
        metavar="I",
        help="which of them this is, 0 to M-1 (default: $PET_NODE_RANK, $NODE_RANK)",
    )
    add(
        "--master-addr",
        "--master_addr",
        dest="master",
        metavar="HOST",
        help="name or address of the first host (default: $PET_MASTER_ADDR, $MASTER_ADDR)",
    )
    add(
        "--master-port",
        "--master_port",
        dest="port",
        type=int,
        metavar="P",
        help="where the first host waits for the others (default: $PET_MASTER_PORT, $MASTER_PORT, "
        f"or {DEFAULT_PORT})",
    )
    add(
        "-H",
        "--host",
        "--hosts",
        dest="hosts",
        metavar="H1:K,H2:K",
        help="start the job on these hosts from here, over ssh, with K ranks each; -np is then the "
        "number of all ranks",
    )
    add(
        "--hostfile",
        "-hostfile",
        metavar="FILE",
        help=f"the same, of a file with lines `H1 slots=K` (default: {DEFAULT_HOSTFILE}, if it is "
        "there)",
    )
    add("--ssh-port", type=int, metavar="P", help="with -H: the port of ssh")
    add("--ssh-identity-file", metavar="FILE", help="with -H: the key file of ssh")
    add(
        "--standalone",
        action="store_true",
        help="one host, whatever the environment says",
    )
    add(
        "--network-interface",
        dest="interface",
        metavar="NAME",
        help="the interface that leads to the other hosts (default: that of the first host's "
        "address)",
    )
    add(
        "--start-timeout",
        type=seconds,
        metavar="TIME",
        help=f"how long hosts wait for each other to come (default: {DEFAULT_START_TIMEOUT:g})",
    )
    add(
        "--host-timeout",
        type=seconds,
        metavar="TIME",
        help=f"after how long a silence a host counts as lost (default: {DEFAULT_HOST_TIMEOUT:g})",
    )
    add(
        "--secret-file",
        dest="secret_file",
        metavar="FILE",
        help="the job's secret, the same on all hosts (default: $COLLECTIVE_SECRET, the file "
        "$COLLECTIVE_SECRET_FILE, or ~/.collective/secret; made if it does not exist)",
    )


def ranks_from_environment(environment: Mapping[str, str]) -> str | None:
    """Returns the number of ranks per host from torchrun's variable."""
    return _variable("ranks", environment)[1]


def host_options(options: argparse.Namespace, environment: Mapping[str, str]) -> HostOptions | None:
    """Returns the hosts from options and environment; None for a job of one host.

    Raises:
        UsageError: the options contradict each other, or something is missing.
    """
    start_timeout, host_timeout = timeouts(options)
    if options.standalone:
        if options.nodes not in (None, "1", "1:1"):
            raise UsageError(f"--standalone is one host, --nnodes {options.nodes} isn't")
        if options.node:
            raise UsageError(f"--standalone is one host, which --node-rank {options.node} isn't")
        return None
    origin, text = _given("--nnodes", options.nodes, "nodes", environment)
    if text is None:
        if options.node is not None and options.node != 0:
            raise UsageError(f"--node-rank {options.node}: give --nnodes, too")
        task = None if options.hosts or options.hostfile else _launcher_task(environment)
        if task is None:
            return None
        nodes, node, first_host = task.size, task.rank, task.first_host
    else:
        nodes, first_host = _nodes(origin, text), ""
        if nodes == 1:
            if options.node:
                raise UsageError(f"--node-rank {options.node}: {origin} 1 has node 0 only")
            return None
        origin, text = _given("--node-rank", options.node, "node", environment)
        if text is None:
            raise UsageError(f"--nnodes {nodes}: give --node-rank, too, 0 on the first host")
        node = _number(origin, text, 0, nodes - 1)
    _, given = _given("--master-addr", options.master, "master", environment)
    master = given or first_host
    if master.startswith("[") and master.endswith("]"):  # an IPv6 address, as in a URL
        master = master[1:-1]
    if not master:
        raise UsageError(
            f"{nodes} hosts: give --master-addr, too, the name or address of the first one"
        )
    origin, text = _given("--master-port", options.port, "port", environment)
    port = DEFAULT_PORT if text is None else _number(origin, text, 1, 65535)
    return HostOptions(
        nodes=nodes,
        node=node,
        master=master,
        port=port,
        interface=options.interface,
        start_timeout=start_timeout,
        host_timeout=host_timeout,
        secret_file=options.secret_file,
    )


def _launcher_task(environment: Mapping[str, str]) -> Membership | None:
    """Returns what the scheduler that started this launcher says about its host's place.

    Raises:
        UsageError: the scheduler has started more than one launcher on a host.
    """
    task = started_by(environment)
    if task is not None and task.local_size > 1:
        raise UsageError(
            f"{task.scheduler} has started {task.local_size} launchers on this host: have it start "
            "one on each (srun --ntasks-per-node=1, mpirun --map-by ppr:1:node), or the script "
            "without the launcher; --standalone makes each a job of its own"
        )
    return task


def _given(
    flag: str, value: object, name: str, environment: Mapping[str, str]
) -> tuple[str, str | None]:
    """Returns the option or variable that gives the value, and the value."""
    if value is not None:
        return flag, str(value)
    return _variable(name, environment)


def _variable(name: str, environment: Mapping[str, str]) -> tuple[str, str | None]:
    for variable in _VARIABLES[name]:
        if environment.get(variable, ""):
            return variable, environment[variable]
    return "", None


def _nodes(origin: str, text: str) -> int:
    least, colon, most = text.partition(":")
    if colon and least != most:
        raise UsageError(
            f"{origin} {text}: a job has a fixed number of hosts; give one number, as {most or 2}"
        )
    return _number(origin, least, 1, _MOST_NODES)


def _number(origin: str, text: str, least: int, most: int) -> int:
    if not _is_number(text) or not least <= int(text) <= most:
        raise UsageError(f"{origin} {text}: give a number, {least} to {most}")
    return int(text)


def _is_number(text: str) -> bool:
    """Tells whether a text has only the digits 0 to 9."""
    return text.isascii() and text.isdigit()


def rank_count(text: str) -> int | str:
    """Reads -np: a number, or 'auto', 'gpu', 'cpu'.

    Raises:
        UsageError: the text is neither.
    """
    if text in ("auto", "gpu", "cpu"):
        return text
    try:
        return int(text)
    except ValueError:
        typed = text if text.strip() else repr(text)
        raise UsageError(f"-np {typed}: give a number of ranks, auto, gpu or cpu") from None


def has_ranks_here(listed: HostList | None) -> bool:
    """Tells whether this host has ranks: of a list, the launcher itself serves only the first."""
    if listed is None:
        return True
    from collective.job.network import (
        is_this_host,  # imported here: it needs psutil, which is slow to import
    )

    return is_this_host(listed.hosts[0][0])


def ranks_here(
    given: str | None, environment: Mapping[str, str], listed: HostList | None
) -> int | str:
    """Returns the number of ranks on this host, as `rank_count` does.

    Args:
        given: -np.
        environment: the launcher's environment; used if there is no list.
        listed: the hosts of -H or of a host file, if the job has such a list.

    Raises:
        UsageError: -np isn't a number of ranks.
    """
    if listed is None and given is None:
        given = ranks_from_environment(environment)
    ranks = None if listed is None else listed.hosts[0][1]
    return rank_count("auto" if given is None else given) if ranks is None else ranks
