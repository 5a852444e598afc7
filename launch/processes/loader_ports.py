"""Where the loaders of a job listen: ports of this host, which nobody else gets while it lasts."""

from __future__ import annotations

import socket
from dataclasses import replace

from collective.job.errors import UsageError
from collective.job.gloo_address import LOOPBACK
from collective.job.secret import new_secret
from collective.job.streams import derived_key
from collective.launch.planning.plan import LaunchPlan


class LoaderPorts:
    """Keeps a free port for each loader, through the loaders' restarts.

    A port is kept by a socket that is bound to it and never listens: a loader may bind it, too,
    because both allow that (SO_REUSEADDR), and no other program gets it from the kernel.

    Args:
        count: how many loaders there are.

    Raises:
        UsageError: there are no ports left.
    """

    def __init__(self, count: int):
        self._sockets: list[socket.socket] = []
        try:
            for _ in range(count):
                kept = socket.socket()
                self._sockets.append(kept)
                kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                kept.bind((LOOPBACK, 0))
        except OSError as error:
            self.close()
            raise UsageError(
                f"--data-loaders {count}: there is no free port for each: {error.strerror}"
            ) from None

    def plan_with_them(self, plan: LaunchPlan) -> LaunchPlan:
        """Returns the plan with the loaders' addresses, and a key that ranks and loaders share."""
        addresses = tuple(f"{LOOPBACK}:{kept.getsockname()[1]}" for kept in self._sockets)
        key = derived_key(new_secret().encode())
        return replace(plan, loader_addresses=addresses, stream_key=key)

    def close(self) -> None:
        """Gives the ports back."""
        for kept in self._sockets:
            kept.close()
