"""The launcher of a host that isn't the first: it acts on this host for the first host's launcher.

    joined ──"start"──▶ ranks run ──all have ended: "done"──▶ waiting ──"over"──▶ exit code
                            │                                    └──"start"──▶ ranks run
                            └──the first host is lost──▶ ranks end ──▶ exit code 137

This launcher reports the signals that it receives to the first host, which passes them on to all
ranks of all hosts. It decides by itself only if the first host is lost: then its ranks get TERM,
and KILL after the grace period.
"""

from __future__ import annotations

import base64
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import BinaryIO

from collective.job.key_value_store import Entry
from collective.job.milestones import Milestones
from collective.job.progress_board import ProgressRecord
from collective.launch.connection.channel import Channel, ChannelClosed
from collective.launch.connection.frames import Refused
from collective.launch.connection.messages import Message
from collective.launch.other_hosts.remote_hosts import LOST, entry_message, message_entry
from collective.launch.output.outcome import loss_report
from collective.launch.output.rank_output import RankStream, last_lines
from collective.launch.planning.plan import LaunchPlan
from collective.launch.processes.local_ranks import LocalRanks
from collective.launch.processes.shutdown import ShutdownSchedule
from collective.launch.processes.signals import SignalPipe
from collective.launch.processes.supervisor import KILL_PATIENCE, SupervisorEvent
from collective.launch.progress.stall_detector import read_records

_MOST_UNTAKEN_BYTES = 1 << 20  # of output that the first host hasn't shown yet
_REPORT_INTERVAL = 1.0


class HostAgent:
    """Runs the ranks of this host on behalf of the first host."""

    def __init__(self, plan: LaunchPlan, signals: SignalPipe, channel: Channel) -> None:
        """Starts nothing yet.

        Args:
            plan: the job's plan, with all hosts.
            signals: the launcher's signals.
            channel: the connection to the first host.
        """
        self._plan = plan
        self._signals = signals
        self._channel: Channel | None = channel
        self._ranks: _RunningRanks | None = None
        self._code: int | None = None
        self._shutdown = ShutdownSchedule(plan.grace)
        self._report: list[str] = []

    def run(self) -> int:
        """Runs the ranks and returns the launcher's exit code, the same as the first host's."""
        self._on_message()  # the first orders may have arrived together with the list of hosts
        while self._code is None or self._ranks is not None:
            self._wait()
            now = time.monotonic()
            self._look(now)
        if self._channel is not None:
            self._channel.close()
        if self._report:
            _say("\n".join(self._report))
        return self._code

    def _wait(self) -> None:
        """Handles signals and messages, or waits for a moment."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.descriptor, selectors.EVENT_READ, self._on_wakeup)
            if self._channel is not None:
                selector.register(self._channel, self._channel.events, self._on_message)
            if self._ranks is not None:
                self._ranks.watch(selector)
            timeout = max(0.0, self._next_time() - time.monotonic())
            for key, _ in selector.select(timeout):
                key.data()

    def _next_time(self) -> float:
        times = [self._shutdown.next_time(), self._shutdown.deadline(2 * KILL_PATIENCE)]
        if self._channel is not None:
            times.append(self._channel.next_time())
        return min([time.monotonic() + _REPORT_INTERVAL, *times])

    def _look(self, now: float) -> None:
        channel, ranks = self._channel, self._ranks
        if channel is not None:
            channel.beat(now)
            silence = channel.silence(now)
            if silence:
                self._lose_first_host(silence)
        if ranks is None:
            return
        for signum in self._shutdown.take_due(now):
            ranks.local.send_signal(signum, to_groups=True)
        if now >= self._shutdown.deadline(2 * KILL_PATIENCE):
            ranks.kill("doesn't answer")
        ranks.look(now)
        if ranks.done:
            self._close_ranks(ranks)

    def _close_ranks(self, ranks: _RunningRanks) -> None:
        ranks.close()
        self._ranks = None

    def _on_wakeup(self) -> None:
        for signum in self._signals.take():
            if signum in self._signals.stop_signals:
                if self._channel is not None:
                    self._channel.send("stopped", number=int(signum))
                    _say(f"collective launch: {signum.name}: told the first host, which stops all")
                else:
                    self._shutdown.begin(signal.SIGKILL, time.monotonic())

    def _on_message(self) -> None:
        channel = self._channel
        if channel is None:
            return
        try:
            for message in channel.receive():
                self._take(message)
        except ChannelClosed as error:
            if self._code is None:
                self._lose_first_host(str(error))
        except Refused as error:
            self._lose_first_host(f"it sent what it may not: {error}")

    def _take(self, message: Message) -> None:
        kind, ranks = message["kind"], self._ranks
        if kind == "start":
            self._start(message)
        elif kind == "say":
            _say(message["text"])
        elif kind == "over":
            self._code = message["code"] & 0xFF
            if ranks is not None:  # the first host no longer waits for them
                self._shutdown.begin(signal.SIGKILL, time.monotonic())
        elif kind in ("signal", "ending", "room", "put", "leave"):
            if ranks is not None:
                ranks.take(message)
        elif kind != "alive":
            raise Refused(f"a message {kind!r} that the first host doesn't send")

    def _start(self, message: Message) -> None:
        if self._ranks is not None:
            if not self._ranks.done:
                raise Refused("a start while ranks run")
            self._close_ranks(self._ranks)  # This launcher was stopped since they have ended.
        watched = message["watched"]
        plan = replace(
            self._plan,
            restart_count=message["attempt"],
            max_restarts=message["restarts"],
            stall_timeout=(self._plan.stall_timeout or 1.0) if watched else 0.0,
        )
        LocalRanks.wait_for_threads()
        self._ranks = _RunningRanks(
            plan, self._signals, frozenset(message["shown"]), self._send, self._connected
        )

    def _send(self, kind: str, **fields: object) -> None:
        if self._channel is not None:
            self._channel.send(kind, **fields)

    def _connected(self) -> bool:
        return self._channel is not None

    def _lose_first_host(self, reason: str) -> None:
        """Ends the ranks, which no other host does any more."""
        first = self._plan.hosts[0].name
        self._report = loss_report(f"the first host, {first},", reason, time.time())
        self._code = LOST
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._ranks is not None:
            self._ranks.local.milestones.mark_ending()
            self._shutdown.begin(signal.SIGTERM, time.monotonic())


class _RunningRanks:
    """Holds the ranks of one attempt, and reports about them."""

    def __init__(
        self,
        plan: LaunchPlan,
        signals: SignalPipe,
        shown: frozenset[int],
        send: Callable[..., None],
        connected: Callable[[], bool],
    ) -> None:
        self.done = False
        self._attempt = plan.restart_count
        self._send = send
        self._connected = connected
        self._wake = signals.wake
        self._entries: deque[Entry] = deque()
        self._untaken = 0
        self._told: dict[tuple[str, int], ProgressRecord | Milestones] = {}
        self._next_report = time.monotonic() + _REPORT_INTERVAL
        self._size = plan.size
        self.local = LocalRanks(plan, signals, self._publish)
        self._running = set(self.local.ranks)
        self._streams: dict[int, tuple[RankStream, RankStream]] = {}
        for rank in self.local.ranks:
            pipe, log = self.local.pipes[rank], self.local.logs[rank]
            forward = self._forward if rank in shown else None
            self._streams[rank] = (
                _ForwardedStream(pipe[0], log[0], rank, False, forward),
                _ForwardedStream(pipe[1], log[1], rank, True, forward),
            )

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Has the selector wait for the ranks' events and output."""
        assert self.local.supervisor is not None
        selector.register(self.local.supervisor.events, selectors.EVENT_READ, self._on_events)
        # A slow reader on the first host slows these ranks, as it slows the ranks there.
        congested = self._untaken > _MOST_UNTAKEN_BYTES and self._connected()
        for stream in self._all_streams():
            if stream.readable and not congested:
                selector.register(stream, selectors.EVENT_READ, stream.read)

    def take(self, message: Message) -> None:
        """Carries out a request of the first host."""
        kind = message["kind"]
        if kind == "signal":
            if not 1 <= message["number"] <= signal.NSIG:
                raise Refused(f"{message['number']} is no signal")
            self.local.send_signal(message["number"], message["groups"])
        elif kind == "ending":
            self.local.milestones.mark_ending()
        elif kind == "room":
            self._untaken -= message["bytes"]
        elif message["attempt"] == self._attempt:
            self.local.rendezvous.apply(message_entry(message))

    def look(self, now: float) -> None:
        """Reports what is new about the ranks."""
        while self._entries:
            kind, fields = entry_message(self._entries.popleft(), self._attempt)
            self._send(kind, **fields)
        for stream in self._all_streams():
            if stream.log_error is not None:
                self._send("trouble", text=f"a log can't be written: {stream.log_error}")
                stream.log_error = None
        if now >= self._next_report and not self.done:
            self._next_report = now + _REPORT_INTERVAL
            self._tell_progress()
            self._tell_milestones()

    def kill(self, reason: str) -> None:
        """Kills the supervisor and everything else."""
        assert self.local.supervisor is not None
        survivors = self.local.kill()
        self._send(
            "trouble",
            text=f"the launcher's supervisor process {self.local.supervisor.pid} {reason}: its "
            f"ranks were killed{'; left: ' if survivors else ''}{' '.join(map(str, survivors))}",
        )
        for rank in sorted(self._running):
            self._tell_exit(rank, 0, -signal.SIGKILL, time.time())
        self._finish()

    def close(self) -> None:
        """Closes what is left of the attempt."""
        for stream in self._all_streams():
            stream.close()
        self.local.close()

    def _on_events(self) -> None:
        assert self.local.supervisor is not None
        events = self.local.supervisor.read_events()
        if events is None:
            if not self.done:
                self.kill("has died")
            return
        for event in events:
            self._take_event(event)

    def _take_event(self, event: SupervisorEvent) -> None:
        if event.kind == "exited":
            self._tell_exit(self.local.rank_of(event), event.pid, event.code, event.time)
        elif event.kind == "undead":
            self._send("trouble", text=f"process {event.pid} can't be killed")
        elif event.kind == "broken":
            self._send("trouble", text=f"the supervisor process failed: {event.text}")
        elif event.kind == "done":
            self._finish()

    def _tell_exit(self, rank: int, pid: int, code: int, when: float) -> None:
        words, source = last_lines(*self._streams[rank])
        self._running.discard(rank)
        self._tell_milestones()
        self._send(
            "exited", rank=rank, pid=pid, code=code, time=when, words=list(words), source=source
        )

    def _finish(self) -> None:
        for stream in self._all_streams():
            stream.drain()
        self._tell_milestones()
        self._send("done")
        self.done = True

    def _tell_progress(self) -> None:
        records = read_records(self.local.board, self._size)
        for rank in self.local.ranks:
            record = records[rank]
            if record is not None and self._told.get(("progress", rank)) != record:
                self._told["progress", rank] = record
                pid, phase, passed, since, doing, collectives = astuple(record)
                self._send(
                    "progress",
                    rank=rank,
                    pid=pid,
                    phase=int(phase),
                    passed=passed,
                    since=since,
                    clock=time.monotonic_ns(),
                    doing=doing,
                    collectives=collectives,
                )

    def _tell_milestones(self) -> None:
        for rank in self.local.ranks:
            milestones = self.local.milestones.read(rank)
            if milestones.pid and self._told.get(("milestones", rank)) != milestones:
                self._told["milestones", rank] = milestones
                self._send(
                    "milestones",
                    rank=rank,
                    pid=milestones.pid,
                    steps=milestones.steps,
                    start=milestones.start,
                    checkpoint=milestones.checkpoint.encode("utf-8", "replace").decode(),
                    step=milestones.step,
                )

    def _publish(self, entry: Entry) -> None:
        self._entries.append(entry)  # runs in a thread of the rendezvous
        self._wake()

    def _forward(self, rank: int, is_error: bool, data: bytes) -> None:
        self._untaken += len(data)
        self._send("output", rank=rank, error=is_error, data=base64.b64encode(data).decode())

    def _all_streams(self) -> list[RankStream]:
        return [stream for streams in self._streams.values() for stream in streams]


class _ForwardedStream(RankStream):
    """Reads one stream of a rank, stores it, and has the first host show it."""

    def __init__(
        self,
        descriptor: int,
        log: BinaryIO | None,
        rank: int,
        is_error: bool,
        forward: Callable[[int, bool, bytes], None] | None,
    ) -> None:
        super().__init__(descriptor, "", None, log)
        self._rank, self._is_error, self._send_on = rank, is_error, forward

    def take(self, data: bytes) -> None:
        super().take(data)
        if self._send_on is not None:
            self._send_on(self._rank, self._is_error, data)


def _say(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass  # stderr has no reader; the first host's launcher ends the job
