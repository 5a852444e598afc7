"""Tells the other hosts that this one can't take part, so that nobody waits for it.

A launcher whose script is missing ends before it has connected to the first host. If the first host
already listens, it is told why, and ends together with all hosts that have connected. If it doesn't
listen yet, it will wait for --start-timeout, since this host may be repaired and started again. If
this host is the first one itself, it listens for some seconds and tells the hosts that connect.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Mapping

from collective.job.errors import UsageError
from collective.job.network import address_of_interface, listening_address, resolve
from collective.job.secret import job_secret
from collective.launch.command_line.host_options import HostOptions
from collective.launch.connection.channel import Channel, ChannelClosed
from collective.launch.connection.frames import Refused
from collective.launch.connection.rendezvous import HostRendezvous, Stopped
from collective.launch.processes.signals import SignalPipe, stop_signals
from collective.version import __version__

_SECONDS = 5.0  # to tell the first host


def withdraw(options: HostOptions, environment: Mapping[str, str], reason: str) -> None:
    """Tells the other hosts if it can reach them. Errors are ignored: the caller's own counts.

    Args:
        options: say which host this is, and where the first one is.
        environment: the launcher's environment, for the secret.
        reason: why this host can't take part.
    """
    try:
        secret = job_secret(environment, options.secret_file)
        if options.node == 0:
            _tell_others(secret, options, reason)
        else:
            _tell_first(secret, options, reason)
    except (UsageError, OSError, ChannelClosed, Refused, Stopped):
        pass


def _tell_others(secret: bytes, options: HostOptions, reason: str) -> None:
    address = listening_address(options.master, options.interface)
    awaited = range(1, options.nodes)
    rendezvous = HostRendezvous(
        address, options.port, secret, awaited, options.nodes, options.host_timeout
    )
    rendezvous.refuse_all(SignalPipe(stop_signals(signal.SIGTERM)), reason)


def _tell_first(secret: bytes, options: HostOptions, reason: str) -> None:
    end = time.monotonic() + _SECONDS
    interface = options.interface
    source = None if interface is None else (address_of_interface(interface), 0)
    for address in resolve(options.master):
        try:
            left = max(0.1, end - time.monotonic())
            connection = socket.create_connection((address, options.port), left, source)
        except OSError:
            continue
        channel = Channel(connection, secret, False, _SECONDS)
        try:
            _tell(channel, end, options, reason)
        finally:
            channel.close()
        return


def _tell(channel: Channel, end: float, options: HostOptions, reason: str) -> None:
    """Tells a peer once both sides have authenticated, and waits until the peer has received it."""
    told = False
    with selectors.DefaultSelector() as selector:
        selector.register(channel, channel.events)
        while time.monotonic() < end:
            selector.modify(channel, channel.events)
            selector.select(0.2)
            list(channel.receive())  # raises when the first host ends the connection: it has heard
            if channel.authenticated and not told:
                told = True
                channel.send(
                    "declined",
                    version=__version__,
                    node=options.node,
                    nodes=options.nodes,
                    host=os.uname().nodename[:255],
                    reason=reason[:1000],
                )
