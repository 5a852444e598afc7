"""A channel: one connection between two launchers, whose calls never wait.

Both sides send a message each second. A side that hears nothing for `--host-timeout` treats the
other host as lost.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator

from collective.launch.connection.frames import FrameStream, Refused
from collective.launch.connection.messages import Message, decode, encode

BEAT = 1.0  # seconds between two heartbeats
_LATE = 5.0  # a heartbeat this late means that this launcher itself was stopped
_MOST_BYTES_A_READ = 1 << 16
_MOST_READS = 16  # at a time: other channels need their turn, too


class ChannelClosed(Exception):
    """Says why a connection ended."""


class Channel:
    """Holds a connection, and the bytes that wait to be sent.

    Attributes:
        peer: the other side's address, for people.
    """

    def __init__(
        self, connection: socket.socket, secret: bytes, is_server: bool, timeout: float
    ) -> None:
        """Takes over the connection.

        Args:
            connection: a connected socket.
            secret: the job's secret.
            is_server: whether the other side opened the connection.
            timeout: after how many seconds of silence the peer counts as lost.
        """
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = _name_of_peer(connection)
        self._socket = connection
        self._stream = FrameStream(secret, is_server)
        self._timeout = timeout
        self._unread: deque[Message] = deque()
        self._last_heard = self._last_beat = self._last_look = time.monotonic()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def authenticated(self) -> bool:
        return self._stream.authenticated

    @property
    def events(self) -> int:
        """Returns the events for which a selector has to wait."""
        writes = selectors.EVENT_WRITE if self._stream.outgoing else 0
        return selectors.EVENT_READ | writes

    @property
    def address(self) -> str:
        """Returns this side's address."""
        return str(self._socket.getsockname()[0])

    def send(self, kind: str, **fields: object) -> None:
        """Queues a message, and sends as much as possible without waiting."""
        self._stream.write(encode(kind, fields))
        self.flush()

    def receive(self) -> Iterator[Message]:
        """Returns the messages that have arrived, and sends what is queued.

        A caller that leaves the iteration early gets the other messages at the next call: several
        may arrive in one piece, and not all are for the same reader. No event tells of them.

        Raises:
            ChannelClosed: the peer, or the network between, ended the connection.
            Refused: the peer sent something that isn't allowed.
        """
        for _ in range(_MOST_READS):
            try:
                data = self._socket.recv(_MOST_BYTES_A_READ)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                raise ChannelClosed(error.strerror or str(error)) from None
            if not data:
                if self._unread:
                    break  # handle its last messages first; the end is seen again
                raise ChannelClosed("it closed the connection")
            try:
                self._unread += [decode(payload) for payload in self._stream.feed(data)]
            except Refused:
                self.flush()
                raise
            self._last_heard = time.monotonic()
        self.flush()
        return self._take_unread()

    def _take_unread(self) -> Iterator[Message]:
        while self._unread:
            yield self._unread.popleft()

    def flush(self) -> None:
        """Sends as much as possible without waiting. A broken connection shows when it is read."""
        outgoing = self._stream.outgoing
        try:
            while outgoing:
                del outgoing[: self._socket.send(outgoing)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            outgoing.clear()

    def beat(self, now: float) -> None:
        """Sends a heartbeat if one is due."""
        if self.authenticated and now >= self._last_beat + BEAT:
            self._last_beat = now
            self.send("alive")

    def silence(self, now: float) -> str:
        """Says that the peer has been silent for too long; "" if it hasn't."""
        late = now - self._last_look > _LATE
        self._last_look = now
        if late:
            self._last_heard = now
        if now - self._last_heard < self._timeout:
            return ""
        return f"nothing was heard of it for {self._timeout:g} s"

    def next_time(self) -> float:
        """Returns when to call `beat` and `silence` next."""
        return self._last_beat + BEAT

    def drain(self, seconds: float) -> None:
        """Sends all that is queued, or as much as possible within `seconds`."""
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_WRITE)
            while self._stream.outgoing and time.monotonic() < end:
                if selector.select(max(0.0, end - time.monotonic())):
                    self.flush()

    def close(self) -> None:
        self._socket.close()


def _name_of_peer(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "a peer that is gone"
