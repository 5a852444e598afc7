"""The plan of a job: everything that is decided before a process starts."""

from __future__ import annotations

import functools
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from collective.job.errors import UsageError
from collective.job.gloo_address import LOOPBACK, addresses_of_name, check_host_name, library
from collective.job.hosts import Host, Placement, placements, ranks_of_node

LONGEST_PAUSE = 60.0  # seconds between two attempts, however many attempts there were


@dataclass(frozen=True)
class LaunchPlan:
    """Says which ranks run what, on which devices, and how the launcher looks after them.

    Attributes:
        command: the command line of every rank.
        devices: each rank's entry for CUDA_VISIBLE_DEVICES, None for a CPU rank.
        launcher_environment: the launcher's own environment variables.
        cores: how many cores the launcher may use.
        terminal: whether the launcher's stderr is a terminal.
        columns: the width of that terminal, None if it isn't known.
        grace: seconds between TERM and KILL.
        time_to_save: seconds that ranks have to save and to end once the job is told to stop.
        shown_ranks: the ranks whose output is shown.
        log_dir: the folder that stores all output, if any.
        verbose: whether everything is shown as the ranks write it.
        stall_timeout: seconds without progress after which the job ends; 0 means never.
        preempt_signal: the signal that acts like TERM.
        max_restarts: how often the job is started again after a failure.
        restart_pause: seconds before the first restart; each further pause is twice as long.
        restart_count: how often it has been started again so far.
        most_ranks: how many ranks were requested; an elastic job may have fewer left.
        min_ranks: how few ranks an elastic job may have; 0 if it isn't elastic.
        hosts: the job's hosts; empty if it has only this host.
        node: this host's number among them; -1 if no rank is here.
        interface: the network interface that leads to the other hosts.
        gloo_address: where the ranks of this host listen for others; "" lets Horovod decide.
        gloo_library: the library that makes the ranks listen there.
        independent: whether the ranks are independent processes that train separately.
        test_mode: whether sessions take one batch only, to try the script.
        no_restart_after: patterns of lines after which a failed job isn't started again.
        leave_out_host_after: patterns of lines after which it is started again without the host.
        starts_hosts: whether this launcher starts those of all hosts, and so can leave one out.
        bound: the cores to which ranks of this host are bound, by their device; see
            `gpu_cores.bound_cores`.
        metrics_port: where rank 0 serves metrics; None leaves it to the environment.
        loaders: how many loaders are started on this host.
        loader_command: the command line of every loader.
        loader_addresses: where they listen, once that is decided.
        stream_key: by which ranks and loaders know each other.
    """

    command: tuple[str, ...]
    devices: tuple[str | None, ...]
    launcher_environment: Mapping[str, str]
    cores: int
    terminal: bool = False
    columns: int | None = None
    grace: float = 5.0
    shown_ranks: frozenset[int] = frozenset()
    log_dir: str | None = None
    verbose: bool = False
    stall_timeout: float = 600.0
    time_to_save: float = 60.0
    preempt_signal: int = signal.SIGTERM
    max_restarts: int = 0
    restart_pause: float = 1.0
    restart_count: int = 0
    most_ranks: int = 0
    min_ranks: int = 0
    hosts: tuple[Host, ...] = ()
    node: int = 0
    interface: str = "lo"
    gloo_address: str = ""
    gloo_library: str = ""
    independent: bool = False
    test_mode: bool = False
    no_restart_after: tuple[str, ...] = ()
    leave_out_host_after: tuple[str, ...] = ()
    starts_hosts: bool = False
    bound: Mapping[str, frozenset[int]] = field(default_factory=dict)
    metrics_port: str | None = None
    loaders: int = 0
    loader_command: tuple[str, ...] = ()
    loader_addresses: tuple[str, ...] = ()
    stream_key: str = ""

    @property
    def size(self) -> int:
        return len(self.devices)

    @functools.cached_property
    def placements(self) -> tuple[Placement, ...]:
        """Returns the place of each rank."""
        return placements(self.hosts or (Host("localhost", self.devices),))

    @property
    def local_ranks(self) -> range:
        """Returns the ranks of this host."""
        if not self.hosts:
            return range(self.size)
        return ranks_of_node(self.hosts, self.node) if self.node >= 0 else range(0)

    def cores_of(self, rank: int) -> frozenset[int] | None:
        """Returns the cores that a rank of this host is bound to; None if it isn't."""
        return self.bound.get(self.devices[rank] or "")

    @property
    def on_gpus(self) -> bool:
        """Tells whether a rank has a GPU."""
        return any(device is not None for device in self.devices)

    @property
    def detects_stalls(self) -> bool:
        """Tells whether the launcher watches progress; a single rank doesn't wait for others."""
        return self.stall_timeout > 0 and self.size > 1


def with_gloo_address(plan: LaunchPlan, address: str = LOOPBACK) -> LaunchPlan:
    """Returns the plan with an address at which this host's ranks listen.

    Args:
        plan: the job's plan.
        address: one of this host's addresses.

    Raises:
        UsageError: the ranks would listen elsewhere, so that other hosts couldn't reach them, or
            wouldn't listen at all.
    """
    has_address = bool(addresses_of_name(socket.gethostname()))
    if plan.size == 1 and has_address:
        return plan
    found = library()
    if found:
        return replace(plan, gloo_address=address, gloo_library=found)
    if plan.size == 1:
        return plan  # the rank joins without Horovod
    if plan.hosts and plan.local_ranks:
        check_host_name(address)
    elif not plan.hosts and not has_address:
        raise UsageError(
            f"the ranks would listen where the name of this host, {socket.gethostname()}, leads, "
            f'and it leads to no address: add a line "127.0.1.1 {socket.gethostname()}" to '
            "/etc/hosts, or compile the operations (`make setup` in a checkout, or `pip install .`)"
        )
    return plan
