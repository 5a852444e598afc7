"""What the command line and the environment say of a job's hosts: torchrun's options and variables.

An option counts before torchrun's variable (PET_NNODES), and this before the plain one (NODE_RANK).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass

from .durations import seconds
from .errors import UsageError

DEFAULT_PORT = 29500  # torchrun's
_MOST_NODES = 4096

# Which variables say it where no option does, the first of them that is set.
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
      node: this one's number.
      master: the name or address of the first one.
      port: where the first one waits for the others.
      interface: the interface that leads to the others, None to find it.
      start_timeout: for how many seconds hosts wait for each other to come.
      host_timeout: after how many seconds of silence a host counts as lost.
      secret_file: the file with the job's secret, if it was named.
    """

    nodes: int
    node: int
    master: str
    port: int
    interface: str | None = None
    start_timeout: float = 600.0
    host_timeout: float = 15.0
    secret_file: str | None = None


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options, in a group of their own."""
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
        default=600.0,
        metavar="TIME",
        help="how long hosts wait for each other to come (default: %(default)g)",
    )
    add(
        "--host-timeout",
        type=seconds,
        default=15.0,
        metavar="TIME",
        help="after how long a silence a host counts as lost (default: %(default)g)",
    )
    add(
        "--secret-file",
        dest="secret_file",
        metavar="FILE",
        help="the job's secret, the same on all hosts (default: $COLLECTIVE_SECRET, the file "
        "$COLLECTIVE_SECRET_FILE, or ~/.collective/secret; made if it isn't there)",
    )


def ranks_from_environment(environment: Mapping[str, str]) -> str | None:
    """Returns what torchrun's variable says of the ranks of a host."""
    return _variable("ranks", environment)[1]


def host_options(options: argparse.Namespace, environment: Mapping[str, str]) -> HostOptions | None:
    """Returns what options and environment say of the hosts; None for a job of one host.

    Raises:
      UsageError: they contradict each other, or something is missing.
    """
    for name in ("start_timeout", "host_timeout"):
        value = getattr(options, name)
        if not 0 < value < math.inf:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {value:g}: give a number of seconds, more than 0")
    if options.standalone:
        if options.nodes not in (None, "1", "1:1"):
            raise UsageError(f"--standalone is one host, --nnodes {options.nodes} isn't")
        return None
    origin, text = _given("--nnodes", options.nodes, "nodes", environment)
    if text is None:
        if options.node is not None and options.node != 0:
            raise UsageError(f"--node-rank {options.node}: give --nnodes, too")
        return None
    nodes = _nodes(origin, text)
    if nodes == 1:
        return None
    origin, text = _given("--node-rank", options.node, "node", environment)
    if text is None:
        raise UsageError(f"--nnodes {nodes}: give --node-rank, too, 0 on the first host")
    node = _number(origin, text, 0, nodes - 1)
    _, master = _given("--master-addr", options.master, "master", environment)
    if not master:
        raise UsageError(
            f"--nnodes {nodes}: give --master-addr, too, the name or address of the first host"
        )
    origin, text = _given("--master-port", options.port, "port", environment)
    port = DEFAULT_PORT if text is None else _number(origin, text, 1, 65535)
    return HostOptions(
        nodes=nodes,
        node=node,
        master=master,
        port=port,
        interface=options.interface,
        start_timeout=options.start_timeout,
        host_timeout=options.host_timeout,
        secret_file=options.secret_file,
    )


def _given(
    flag: str, value: object, name: str, environment: Mapping[str, str]
) -> tuple[str, str | None]:
    """Returns who says it, an option or a variable, and what."""
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
    if not text.isdigit() or not least <= int(text) <= most:
        raise UsageError(f"{origin} {text}: give a number, {least} to {most}")
    return int(text)
