"""Makes hosts of network namespaces, with slow links between them, for step.py."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.jobs.hosts.network import Network, why_not


class SlowHosts(Network):
    """Knows how a launcher on each of them finds the others."""

    def options_of(self, name: str) -> list[str]:
        """Returns the launcher's options on a host."""
        nodes = ["--nnodes", str(len(self.names)), "--node-rank", str(self.names.index(name))]
        return [*nodes, "--master-addr", self.address(self.names[0])]


@contextlib.contextmanager
def slow_hosts(count: int, rate: str, delay: str) -> Iterator[tuple[SlowHosts, str]]:
    """Makes hosts, whose links have a rate and a delay in tc's words, and removes them.

    Gives the hosts, and what their links are like: there is no delay where the kernel has no netem.

    Raises:
        SystemExit: they can't be made here.
    """
    problem = why_not()
    if problem:
        sys.exit(f"step.py --hosts {count}: {problem}")
    os.environ.setdefault("COLLECTIVE_SECRET", secrets.token_hex(16))
    hosts = SlowHosts([f"h{number}" for number in range(1, count + 1)])
    try:
        hosts.make()
        delayed = hosts.slow_down(rate, delay)
        yield hosts, f"links of {rate}, " + (delay if delayed else "no delay (there is no netem)")
    finally:
        hosts.remove()
