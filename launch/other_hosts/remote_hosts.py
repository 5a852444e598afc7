"""The other hosts of a job, as the first host's launcher sees them.

The first host decides for all: when to stop, which rank is the root cause, whether to start again.
The launcher of another host (`host_agent.py`) starts its ranks on request, passes signals on, and
reports its ranks' ends and output. So a job of several hosts runs like a job of one host.
"""

from __future__ import annotations

import base64
import binascii
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from collective.job.hosts import ranks_of_node
from collective.job.key_value_store import Entry
from collective.job.milestones import Milestones
from collective.job.progress_board import Phase, ProgressRecord
from collective.launch.connection.channel import Channel, ChannelClosed
from collective.launch.connection.frames import Refused
from collective.launch.connection.messages import Message
from collective.launch.connection.rendezvous import Guest
from collective.launch.output.outcome import RankExit
from collective.launch.planning.plan import LaunchPlan
from collective.launch.processes.signals import SignalPipe

LOST = 128 + signal.SIGKILL  # the exit code of a job that has lost a host
_FAREWELL_SECONDS = 5.0


class Listener(Protocol):
    """Is told what happens on other hosts; an attempt is the listener."""

    def on_rank_exit(self, rank_exit: RankExit) -> None: ...
    def on_output(self, rank: int, is_error: bool, data: bytes) -> None: ...
    def on_milestones(self, rank: int, milestones: Milestones) -> None: ...
    def on_trouble(self, text: str) -> None: ...
    def on_stop_signal(self, signum: signal.Signals, host: str) -> None: ...
    def on_host_lost(self, name: str, ranks: range, reason: str) -> None: ...
    def on_host_unable(self, name: str, ranks: range, reason: str) -> None: ...
    def apply(self, entry: Entry) -> None: ...


class _Unable(Exception):
    """Says why a host can't start its ranks."""


class _RemoteHost:
    """Holds what is known about a host."""

    def __init__(self, channel: Channel, name: str, ranks: range) -> None:
        self.channel = channel
        self.name = name
        self.ranks = ranks
        self.running = set(ranks)
        self.done = False
        self.owed = 0  # bytes of output received but not yet acknowledged
        self.clock_offset: int | None = None  # nanoseconds from its clock to this host's

    def speaks_for(self, rank: int) -> int:
        if rank not in self.ranks:
            raise Refused(f"it speaks for rank {rank}, which isn't its own")
        return rank


class RemoteHosts:
    """Holds the other hosts. Without any, every method does nothing.

    Attributes:
        records: each remote rank's latest record on its progress board.
        lost: the name of the first host that was lost; "" if none was.
    """

    def __init__(self, guests: Mapping[int, Guest], plan: LaunchPlan) -> None:
        """Takes over the channels.

        Args:
            guests: the connected hosts, by their number among the plan's hosts.
            plan: the job's plan.
        """
        self.records: dict[int, ProgressRecord] = {}
        self._hosts: list[_RemoteHost] = []
        for node, guest in guests.items():
            ranks = ranks_of_node(plan.hosts, node)
            self._hosts.append(_RemoteHost(guest.channel, plan.hosts[node].name, ranks))
        self._attempt = 0
        self._listener: Listener | None = None
        self._entries: deque[Entry] = deque()
        self._selector: selectors.BaseSelector | None = None
        self._registered: set[_RemoteHost] = set()
        self._wake: Callable[[], None] = lambda: None
        self.lost = ""

    def __bool__(self) -> bool:
        return bool(self._hosts)

    @property
    def done(self) -> bool:
        """Tells whether all ranks of all hosts have ended."""
        return all(host.done for host in self._hosts)

    def start(
        self,
        plan: LaunchPlan,
        listener: Listener,
        selector: selectors.BaseSelector,
        wake: Callable[[], None],
    ) -> None:
        """Has all hosts start their ranks; `listener` is told what happens there."""
        self._attempt = plan.restart_count
        self._listener, self._selector, self._wake = listener, selector, wake
        self._registered = set()
        self._entries.clear()
        self.records.clear()
        for host in self._hosts:
            host.running, host.done = set(host.ranks), False
            host.channel.send(
                "start",
                attempt=plan.restart_count,
                restarts=plan.max_restarts,
                shown=sorted(plan.shown_ranks & set(host.ranks)),
                watched=plan.detects_stalls,
            )

    def publish(self, entry: Entry) -> None:
        """Takes, from any thread, an entry that a rank of this host made at the rendezvous."""
        self._entries.append(entry)
        self._wake()

    def watch(self) -> None:
        """Has the selector wait for the hosts' messages."""
        if self._selector is None:
            return
        for host in set(self._hosts) - self._registered:
            self._selector.register(host.channel, host.channel.events, lambda h=host: self._hear(h))
            self._registered.add(host)
        for host in self._registered:
            self._selector.modify(host.channel, host.channel.events, lambda h=host: self._hear(h))

    def next_time(self) -> float:
        """Returns when to call `look` next; infinity without hosts."""
        return min((host.channel.next_time() for host in self._hosts), default=float("inf"))

    def look(self, now: float, congested: bool) -> None:
        """Does what is due: sends heartbeats, and finds hosts that are lost.

        Args:
            now: the time.
            congested: whether output isn't being read, so that hosts shouldn't send more.
        """
        while self._entries:
            self._distribute(self._entries.popleft())
        for host in list(self._hosts):
            host.channel.beat(now)
            silence = host.channel.silence(now)
            if silence:
                self.lose(host, silence)
            elif host.owed and not congested:
                host.channel.send("room", bytes=host.owed)
                host.owed = 0

    def send_signal(self, signum: int, to_groups: bool) -> None:
        """Sends a signal to all ranks of all hosts."""
        self._tell("signal", number=int(signum), groups=to_groups)

    def mark_ending(self) -> None:
        """Tells all ranks that the job ends: from now on a signal doesn't ask them to save."""
        self._tell("ending")

    def say(self, text: str) -> None:
        """Has every host write these lines."""
        if text:
            self._tell("say", text=text[: 1 << 18])

    def give_up(self, reason: str) -> None:
        """Treats the hosts whose ranks don't end as lost."""
        for host in list(self._hosts):
            if not host.done:
                self.lose(host, reason)

    def finish(self, code: int) -> None:
        """Ends the job on every host, with this exit code."""
        self._tell("over", code=code)
        end = time.monotonic() + _FAREWELL_SECONDS
        for host in self._hosts:
            host.channel.drain(max(0.0, end - time.monotonic()))
            host.channel.close()
        self._hosts = []

    def pause(self, signals: SignalPipe, seconds: float) -> signal.Signals | None:
        """Waits between two attempts; returns the signal that asked to stop, None if none came.

        The pause ends early if a host is lost.
        """
        end = time.monotonic() + seconds
        listener = _PauseListener()
        self._listener, self._selector = listener, None
        while True:
            now = time.monotonic()
            stop = signals.wait(min(0.2, max(0.0, end - now))) if self else signals.wait(end - now)
            for host in list(self._hosts):
                self._hear(host)
            self.look(time.monotonic(), congested=False)
            stop = stop or listener.stop
            if stop is not None or now >= end or self.lost:
                return stop

    def lose(self, host: _RemoteHost, reason: str) -> None:
        """Treats a host as lost."""
        self._remove(host)
        assert self._listener is not None
        self._listener.on_host_lost(host.name, host.ranks, reason)

    def _remove(self, host: _RemoteHost) -> None:
        """Stops waiting for a host."""
        self._hosts.remove(host)
        self.lost = self.lost or host.name
        if host in self._registered and self._selector is not None:
            self._selector.unregister(host.channel)
            self._registered.discard(host)
        host.channel.close()
        for rank in host.ranks:
            self.records.pop(rank, None)

    def _tell(self, kind: str, **fields: object) -> None:
        for host in self._hosts:
            host.channel.send(kind, **fields)

    def _hear(self, host: _RemoteHost) -> None:
        if host not in self._hosts:  # it was lost a moment ago
            return
        try:
            for message in host.channel.receive():
                self._take(host, message)
        except ChannelClosed as error:
            self.lose(host, str(error))
        except Refused as error:
            self.lose(host, f"it sent what it may not: {error}")
        except _Unable as error:
            self._remove(host)
            assert self._listener is not None
            self._listener.on_host_unable(host.name, host.ranks, str(error))

    def _take(self, host: _RemoteHost, message: Message) -> None:
        listener = self._listener
        assert listener is not None
        kind = message["kind"]
        if kind == "exited":
            rank = host.speaks_for(message["rank"])
            if rank in host.running:
                host.running.discard(rank)
                listener.on_rank_exit(_rank_exit(host.name, message))
        elif kind == "output":
            data = _bytes(message["data"])
            host.owed += len(data)
            listener.on_output(host.speaks_for(message["rank"]), message["error"], data)
        elif kind == "progress":
            self.records[host.speaks_for(message["rank"])] = _record(host, message)
        elif kind == "milestones":
            rank = host.speaks_for(message["rank"])
            listener.on_milestones(rank, _milestones(message))
        elif kind == "trouble":
            listener.on_trouble(f"host {host.name}: {message['text'][:1000]}")
        elif kind == "unable":
            raise _Unable(message["reason"][:1000])
        elif kind == "stopped":
            listener.on_stop_signal(_signal(message["number"]), host.name)
        elif kind == "done":
            host.done = True
        elif kind in ("put", "leave"):
            if message["attempt"] == self._attempt:
                self._distribute(message_entry(message))
        elif kind != "alive":
            raise Refused(f"a message {kind!r} that only the first host sends")

    def _distribute(self, entry: Entry) -> None:
        """Repeats a rank's rendezvous entry on all hosts, in the same order on each."""
        assert self._listener is not None
        self._listener.apply(entry)
        kind, fields = entry_message(entry, self._attempt)
        self._tell(kind, **fields)


class _PauseListener:
    """Listens between two attempts: only a request to stop counts."""

    stop: signal.Signals | None = None

    def on_rank_exit(self, rank_exit: RankExit) -> None: ...
    def on_output(self, rank: int, is_error: bool, data: bytes) -> None: ...
    def on_milestones(self, rank: int, milestones: Milestones) -> None: ...
    def on_trouble(self, text: str) -> None: ...
    def apply(self, entry: Entry) -> None: ...
    def on_host_lost(self, name: str, ranks: range, reason: str) -> None: ...
    def on_host_unable(self, name: str, ranks: range, reason: str) -> None: ...

    def on_stop_signal(self, signum: signal.Signals, host: str) -> None:
        self.stop = self.stop or signum


def entry_message(entry: Entry, attempt: int) -> tuple[str, dict[str, object]]:
    """Returns the kind and the fields of the message that carries an entry."""
    fields: dict[str, object] = {"attempt": attempt, "scope": entry.scope, "key": entry.key}
    if entry.value is None:
        return "leave", fields
    return "put", {**fields, "value": base64.b64encode(entry.value).decode()}


def message_entry(message: Message) -> Entry:
    """Returns the entry that a message "put" or "leave" carries."""
    value = _bytes(message["value"]) if message["kind"] == "put" else None
    return Entry(message["scope"], message["key"], value)


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        raise Refused("a text that is no base64") from None


def _signal(number: int) -> signal.Signals:
    try:
        return signal.Signals(number)
    except ValueError:
        raise Refused(f"{number} is no signal") from None


def _rank_exit(host: str, message: Message) -> RankExit:
    return RankExit(
        message["rank"],
        message["pid"],
        message["code"],
        message["time"],
        last_lines=tuple(message["words"]),
        last_lines_from=message["source"],
        host=host,
    )


def _record(host: _RemoteHost, message: Message) -> ProgressRecord:
    if host.clock_offset is None:
        host.clock_offset = time.monotonic_ns() - message["clock"]
    try:
        phase = Phase(message["phase"])
    except ValueError:
        raise Refused(f"{message['phase']} is no phase") from None
    return ProgressRecord(
        message["pid"],
        phase,
        message["passed"],
        message["since"] + host.clock_offset,
        message["doing"],
        message["collectives"],
    )


def _milestones(message: Message) -> Milestones:
    numbers = [message[name] for name in ("pid", "steps", "start", "step")]
    if min(numbers) < 0 or message["pid"] >= 1 << 32:
        raise Refused("milestones with a number that can't be")
    return Milestones(
        message["pid"],
        message["steps"],
        message["start"],
        message["checkpoint"],
        message["step"],
    )
