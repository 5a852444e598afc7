"""How the hosts of a job find each other: the first one listens, the others connect to it.

    first host                                      host i
    listens at --master-addr:--master-port    ◀──   connects, again and again until it succeeds
    both prove that they hold the secret      ◀─▶
                                              ◀──   "join": its number, name, devices, version;
                                                    or "declined" (withdrawal.py): it can't take
                                                    part. Hosts that come just afterwards are told,
                                                    also if the first host itself can't take part
    has all: stops listening
    "world": all hosts, in their order        ──▶

A client is unknown at first. So the number of connections is limited, in all and per address; each
has a few seconds to prove itself; and each kind of refusal is reported in only one line.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collective.job.errors import UsageError
from collective.job.hosts import Host, distinct_names
from collective.launch.connection.channel import Channel, ChannelClosed
from collective.launch.connection.frames import Refused
from collective.launch.connection.messages import Message
from collective.launch.processes.signals import SignalPipe
from collective.version import __version__

HANDSHAKE_SECONDS = 10.0
MOST_STRANGERS = 256  # connections that haven't proved themselves
MOST_STRANGERS_OF_ADDRESS = 32
_CONNECT_SECONDS = 3.0
_RETRY_SECONDS = 0.25
_TELL_SECONDS = 20.0  # between two lines about missing hosts
_BACKLOG = 128
_LATE_SECONDS = 10.0  # to tell hosts that come after one has declined


class Stopped(Exception):
    """Says that a signal told the launcher to stop while it waited for hosts."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum


class Declined(UsageError):
    """Says that a host has connected only to say that it can't take part."""


@dataclass(frozen=True)
class Guest:
    """Holds a host that has connected to the first one: its channel, name and devices."""

    channel: Channel
    name: str
    devices: tuple[str | None, ...]


class HostRendezvous:
    """Waits, on the first host, for the others."""

    def __init__(
        self,
        address: str,
        port: int,
        secret: bytes,
        awaited: Sequence[int],
        nodes: int,
        host_timeout: float,
    ) -> None:
        """Starts to listen.

        Args:
            address: one of this host's addresses.
            port: the port; 0 lets the kernel choose.
            secret: the job's secret.
            awaited: the numbers of the hosts that are to connect.
            nodes: how many hosts the job has.
            host_timeout: after how many seconds of silence a host counts as lost.

        Raises:
            UsageError: this host can't listen at the address.
        """
        self._secret = secret
        self._awaited = frozenset(awaited)
        self._nodes = nodes
        self._host_timeout = host_timeout
        self._guests: dict[int, Guest] = {}
        self._strangers: dict[Channel, float] = {}  # the deadline by which each has to prove itself
        self._refusals: dict[str, int] = {}
        self._given_up = ""  # the reason that hosts are told if the job is given up
        self._told: set[int] = set()  # the hosts that were told
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((address, port))
            self._listener.listen(_BACKLOG)
        except OSError as error:
            self._listener.close()
            raise UsageError(
                f"--master-port {port} at {address} can't be listened at: {error.strerror}; if "
                "another job has it, choose another for all hosts"
            ) from None
        self._listener.setblocking(False)
        self.address, self.port = self._listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    def wait(
        self,
        signals: SignalPipe,
        timeout: float,
        problem: Callable[[], str] = lambda: "",
    ) -> dict[int, Guest]:
        """Returns the awaited hosts once all have connected; then stops listening.

        Args:
            signals: the launcher's signals.
            timeout: how many seconds to wait.
            problem: returns why waiting is no use any longer, "" while it is.

        Raises:
            UsageError: not all have connected in time, or one says that it can't take part.
            Stopped: the launcher is told to stop.
        """
        start = time.monotonic()
        told = start
        self._selector.register(signals.descriptor, selectors.EVENT_READ, None)
        try:
            while len(self._guests) < len(self._awaited):
                now = time.monotonic()
                reason = problem()
                if not reason and now > start + timeout:
                    reason = (
                        f"after {timeout:g} s (--start-timeout) {self._missing()} of {self._nodes} "
                        f"did not come to {self.address} port {self.port}"
                    )
                if reason:
                    raise UsageError(reason)
                if now > told + _TELL_SECONDS:
                    told = now
                    _say(f"waiting for {self._missing()} of {self._nodes}")
                self._look(signals, now)
        except BaseException as error:
            self._give_up(str(error) or type(error).__name__)
            if isinstance(error, Declined):
                self._tell_late_hosts(signals)
            raise
        finally:
            self.close()
        return self._guests

    def refuse_all(self, signals: SignalPipe, reason: str) -> None:
        """Tells hosts that connect in the next seconds why the first one can't take part.

        Raises:
            Stopped: the launcher is told to stop.
        """
        self._selector.register(signals.descriptor, selectors.EVENT_READ, None)
        try:
            self._give_up(reason)
            self._tell_late_hosts(signals)
        finally:
            self.close()

    def _give_up(self, words: str) -> None:
        """Tells all connected hosts, and ends their connections."""
        self._given_up = f"the first host gave up: {words}"
        for node, guest in self._guests.items():
            guest.channel.send("refused", reason=self._given_up)
            guest.channel.drain(1.0)
            self._forget(guest.channel)
            self._told.add(node)
        self._guests.clear()

    def _tell_late_hosts(self, signals: SignalPipe) -> None:
        """Tells hosts that connect within seconds; else they would wait for --start-timeout."""
        end = time.monotonic() + _LATE_SECONDS
        if self._awaited - self._told:
            _say(f"waiting up to {_LATE_SECONDS:g} s for {self._missing()}, to say so there, too")
        while self._awaited - self._told and time.monotonic() < end:
            self._look(signals, time.monotonic())

    def _look(self, signals: SignalPipe, now: float) -> None:
        """Waits briefly for connections and messages, and handles them."""
        ready = self._selector.select(0.2)
        for signum in signals.take():
            if signum in signals.stop_signals:
                raise Stopped(signum)
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept(now)
            elif isinstance(key.fileobj, Channel):
                self._hear(key.fileobj)
        for channel, end in list(self._strangers.items()):
            if now > end:
                self._refuse(channel, "it was too slow")
        for node, guest in list(self._guests.items()):
            guest.channel.beat(now)
            silence = guest.channel.silence(now)
            if silence:
                self._lose(node, silence)
        for channel in [*self._strangers, *(guest.channel for guest in self._guests.values())]:
            self._selector.modify(channel, channel.events)

    def _accept(self, now: float) -> None:
        for _ in range(_BACKLOG):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # the peer has left, or no descriptor is free
                return
            try:
                channel = Channel(connection, self._secret, True, self._host_timeout)
            except OSError:
                connection.close()
                continue
            same = sum(other.peer == channel.peer for other in self._strangers)
            if same >= MOST_STRANGERS_OF_ADDRESS or len(self._strangers) >= MOST_STRANGERS:
                self._note(channel.peer, "too many connections at a time")
                channel.close()
                continue
            self._strangers[channel] = now + HANDSHAKE_SECONDS
            self._selector.register(channel, channel.events)

    def _hear(self, channel: Channel) -> None:
        node = next(
            (node for node, guest in self._guests.items() if guest.channel is channel), None
        )
        try:
            messages = channel.receive()
            for message in messages:
                if node is None:
                    node = self._take(channel, message)
                elif message["kind"] != "alive":
                    raise Refused(f"a message {message['kind']!r} before the job has begun")
        except (Refused, ChannelClosed) as error:
            if node is not None and node in self._guests:
                self._lose(node, str(error))
            elif channel in self._strangers:
                self._refuse(channel, str(error))

    def _take(self, channel: Channel, message: Message) -> int:
        """Accepts a host that has proved itself and says which one it is."""
        if message["kind"] == "alive":
            raise Refused("a word before it has said who it is")
        if message["kind"] not in ("join", "declined"):
            raise Refused(f"a message {message['kind']!r} before it has said who it is")
        node = int(message["node"])
        reason = self._objection(message)
        if reason:
            channel.send("refused", reason=reason)
            channel.drain(1.0)
            raise Refused(f"host {message['host'][:100]!r}: {reason}")
        if self._given_up:
            channel.send("refused", reason=self._given_up)
            channel.drain(1.0)
            self._part(node, channel)
            return node
        if message["kind"] == "declined":
            host = f"host {message['host'][:100]} (node {node})"
            self._part(node, channel)
            raise Declined(f"{host} can't take part: {message['reason'][:1000]}")
        del self._strangers[channel]
        self._guests[node] = Guest(channel, message["host"][:255], tuple(message["devices"]))
        return node

    def _part(self, node: int, channel: Channel) -> None:
        """Ends the connection to a host that knows why the job doesn't start."""
        del self._strangers[channel]
        self._forget(channel)
        self._told.add(node)

    def _objection(self, message: Message) -> str:
        node = message["node"]
        if message["version"] != __version__:
            return (
                f"it has collective {message['version'][:40]}, the first host {__version__}: "
                "install the same on all"
            )
        if message["nodes"] != self._nodes:
            return f"it says --nnodes {message['nodes']}, the first host --nnodes {self._nodes}"
        if node in self._guests:
            return f"--node-rank {node} is taken by host {self._guests[node].name}"
        if node not in self._awaited:
            return f"--node-rank {node} isn't awaited, but {sorted(self._awaited)}"
        return "" if message.get("devices", True) else "it has no rank"

    def _refuse(self, channel: Channel, reason: str) -> None:
        self._note(channel.peer, reason)
        del self._strangers[channel]
        self._forget(channel)

    def _note(self, peer: str, reason: str) -> None:
        """Writes a line, but only the first time."""
        if reason not in self._refusals:
            _say(f"refused a connection from {peer}: {reason}")
        self._refusals[reason] = self._refusals.get(reason, 0) + 1

    def _lose(self, node: int, reason: str) -> None:
        guest = self._guests.pop(node)
        _say(f"host {guest.name} (node {node}) has left again: {reason}")
        self._forget(guest.channel)

    def _forget(self, channel: Channel) -> None:
        self._selector.unregister(channel)
        channel.close()

    def _missing(self) -> str:
        missing = sorted(self._awaited - set(self._guests) - self._told)
        return f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"

    def close(self) -> None:
        """Stops listening, and closes all connections except those of accepted hosts."""
        for channel in self._strangers:
            channel.close()
        self._strangers.clear()
        self._listener.close()
        self._selector.close()
        for reason, count in self._refusals.items():
            if count > 1:
                _say(f"refused {count} connections in all: {reason}")
        self._refusals.clear()


def join(
    addresses: Callable[[], Sequence[str]],
    port: int,
    secret: bytes,
    introduction: Message,
    timeouts: tuple[float, float],
    signals: SignalPipe,
    source: str | None = None,
    returns: bool = True,
) -> tuple[Channel, list[Host], int]:
    """Connects to the first host, and waits with it for the others.

    Args:
        addresses: finds the first host's addresses; called for each try.
        port: the port on which it listens.
        secret: the job's secret.
        introduction: the fields of "join".
        timeouts: how many seconds to try, and how many seconds of silence to allow.
        signals: the launcher's signals.
        source: this host's address for the connection, None to let the kernel choose.
        returns: whether the first host may still have to start, or may start again after it has
            gone. That is so if a user or a scheduler starts it; not if it has started this host.

    Returns:
        The channel, all hosts, and this one's number.

    Raises:
        UsageError: the first host can't be reached, or has refused this one.
        Stopped: the launcher is told to stop.
    """
    end = time.monotonic() + timeouts[0]
    channel: Channel | None = None
    while True:
        if channel is None:
            channel = _connect(addresses, port, secret, timeouts[1], end, signals, source, returns)
        try:
            return _wait_for_world(channel, introduction, signals)
        except ChannelClosed as error:
            # A host that gives up says so. This one had too many unknown clients, or was killed.
            joined = channel.authenticated
            channel.close()
            channel = None
            if (joined and not returns) or time.monotonic() > end:
                raise UsageError(f"the first host has gone before the job began: {error}") from None
            if joined:
                _say(f"the first host has gone ({error}); waiting until it comes again")
            _pause(signals, _RETRY_SECONDS)
        except Refused as error:
            peer = channel.peer
            channel.close()
            raise UsageError(f"{peer} port {port} isn't this job's first host: {error}") from None


def _connect(
    addresses: Callable[[], Sequence[str]],
    port: int,
    secret: bytes,
    silence: float,
    end: float,
    signals: SignalPipe,
    source: str | None,
    returns: bool,
) -> Channel:
    told = time.monotonic()
    while True:
        problem = ""
        try:
            found = addresses()
        except UsageError as error:  # the name may resolve only once the first host starts
            found, problem = [], str(error)
        for address in found:
            try:
                origin = (source, 0) if source else None
                connection = socket.create_connection((address, port), _CONNECT_SECONDS, origin)
                return Channel(connection, secret, False, silence)
            except OSError as error:
                problem = f"{address} port {port}: {error.strerror or error}"
                if isinstance(error, ConnectionRefusedError) and not returns:
                    raise UsageError(
                        f"the first host does not answer, or refuses connections: {problem}"
                    ) from None
        now = time.monotonic()
        if now > end:
            raise UsageError(f"the first host did not answer within --start-timeout: {problem}")
        if now > told + _TELL_SECONDS:
            told = now
            _say(f"waiting for the first host: {problem}")
        _pause(signals, _RETRY_SECONDS)


def _wait_for_world(
    channel: Channel, introduction: Message, signals: SignalPipe
) -> tuple[Channel, list[Host], int]:
    introduced = False
    handshake_end = time.monotonic() + HANDSHAKE_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(channel, channel.events)
        selector.register(signals.descriptor, selectors.EVENT_READ)
        while True:
            now = time.monotonic()
            selector.modify(channel, channel.events)
            selector.select(0.5)
            for signum in signals.take():
                if signum in signals.stop_signals:
                    channel.close()
                    raise Stopped(signum)
            messages = channel.receive()
            if channel.authenticated and not introduced:
                introduced = True
                channel.send("join", **introduction)
            for message in messages:
                if message["kind"] == "refused":
                    channel.close()
                    raise UsageError(message["reason"])
                if message["kind"] == "world":
                    hosts = [
                        Host(each["name"], tuple(each["devices"])) for each in message["hosts"]
                    ]
                    if not 0 <= message["node"] < len(hosts):
                        raise Refused("a world without this host")
                    return channel, hosts, message["node"]
                if message["kind"] != "alive":
                    raise Refused(f"a message {message['kind']!r} before the job has begun")
            channel.beat(now)
            silence = channel.silence(now)
            if not channel.authenticated and now > handshake_end:
                silence = "it doesn't answer"
            if silence:
                raise ChannelClosed(silence)


def introduction(node: int, nodes: int, devices: Sequence[str | None]) -> Message:
    """Returns the fields with which a host introduces itself."""
    return {
        "version": __version__,
        "node": node,
        "nodes": nodes,
        "host": os.uname().nodename[:255],
        "devices": list(devices),
    }


def make_world(own: Sequence[Host], guests: dict[int, Guest]) -> list[Host]:
    """Returns all hosts in order with distinct names, and sends them to each host.

    Args:
        own: the first host; empty if the job is only started from here.
        guests: the others.
    """
    nodes = sorted(guests)
    names = distinct_names([host.name for host in own] + [guests[node].name for node in nodes])
    devices = [host.devices for host in own] + [guests[node].devices for node in nodes]
    hosts = [Host(name, each) for name, each in zip(names, devices)]
    described = [{"name": host.name, "devices": list(host.devices)} for host in hosts]
    for number, node in enumerate(nodes, len(own)):
        guests[node].channel.send("world", hosts=described, node=number)
    return hosts


def _pause(signals: SignalPipe, seconds: float) -> None:
    signum = signals.wait(seconds)
    if signum is not None:
        raise Stopped(signum)


def _say(text: str) -> None:
    print(f"collective launch: {text}", file=sys.stderr, flush=True)
