"""Hosts made of network namespaces: each with an address, a name and a loopback of its own.

    namespace "h1" ── veth ──┐
    namespace "h2" ── veth ──┤ bridge, in a namespace of its own
    namespace "h3" ── veth ──┘

It needs root, or a user namespace in which one is root, and `ip`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Sequence


def why_not() -> str:
    """Returns why no such hosts can be made here; "" if they can."""
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"there is no program {program}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    trial = Network([])
    try:
        trial.make()
    except subprocess.CalledProcessError as error:
        return f"network namespaces aren't permitted: {error.stderr.strip()}"
    finally:
        trial.remove()
    return ""


class Network:
    """Makes hosts with the addresses 10.77.0.1, 10.77.0.2, ... or fd77::1, fd77::2, ..."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._mark = uuid.uuid4().hex[:6]
        self._made: list[str] = []
        self._version = 4

    def make(self, version: int = 4) -> None:
        """Makes the hosts, with addresses of a version of IP."""
        self._version = version
        bridge = self._namespace("bridge")
        _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "br0", "up")
        for number, name in enumerate(self.names, 1):
            host, port = self._namespace(name), f"port{number}"
            own_end = ("peer", "name", "net0", "netns", host)
            _run("ip", "-n", bridge, "link", "add", port, "type", "veth", *own_end)
            _run("ip", "-n", bridge, "link", "set", port, "master", "br0")
            _run("ip", "-n", bridge, "link", "set", port, "up")
            own = f"{self.address(name)}/{24 if version == 4 else 64}"
            # Whether another host has the address takes IPv6 seconds to find out.
            sure = ("nodad",) if version == 6 else ()
            _run("ip", "-n", host, "addr", "add", own, "dev", "net0", *sure)
            for device in ("lo", "net0"):
                _run("ip", "-n", host, "link", "set", device, "up")

    def remove(self) -> None:
        """Removes the hosts. Processes on them must have ended."""
        for namespace in self._made:
            subprocess.run(["ip", "netns", "delete", namespace], check=False)
        self._made = []

    def address(self, name: str) -> str:
        """Returns the address of a host."""
        before = "10.77.0." if self._version == 4 else "fd77::"
        return f"{before}{self.names.index(name) + 1}"

    def on_host(self, name: str) -> list[str]:
        """Returns the words that run the command after them on a host.

        With NETWORK_HOSTS in the environment that file is the host's /etc/hosts.
        """
        set_name = (
            'hostname "$0" && { [ -z "$NETWORK_HOSTS" ] || '
            'mount --bind "$NETWORK_HOSTS" /etc/hosts; } && exec "$@"'
        )
        inside = ["unshare", "--uts", "--mount", "sh", "-c", set_name, name]
        return ["ip", "netns", "exec", self._name(name), *inside]

    def part(self, name: str, other: str) -> None:
        """Lets no packet of a host go to another."""
        _run("ip", "-n", self._name(name), "route", "add", "unreachable", self.address(other))

    def cut(self, name: str) -> None:
        """Cuts a host's link: packets vanish, and nobody is told."""
        port = f"port{self.names.index(name) + 1}"
        _run("ip", "-n", self._name("bridge"), "link", "set", port, "down")

    def slow_down(self, rate: str, delay: str) -> bool:
        """Limits what every host sends, in tc's words: "1gbit", "0.2ms".

        Returns whether there is a delay, too, for which the kernel needs netem.
        """
        delayed = True
        for number, name in enumerate(self.names, 1):
            limit = ("tbf", "rate", rate, "burst", "64kb", "latency", "100ms")
            self._queue(self._name(name), "net0", *limit)
            try:
                self._queue(self._name("bridge"), f"port{number}", "netem", "delay", delay)
            except subprocess.CalledProcessError:
                delayed = False
        return delayed

    def _queue(self, namespace: str, device: str, *how: str) -> None:
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *how)

    def _namespace(self, name: str) -> str:
        namespace = self._name(name)
        _run("ip", "netns", "add", namespace)
        self._made.append(namespace)
        return namespace

    def _name(self, name: str) -> str:
        return f"collective-{self._mark}-{name}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
