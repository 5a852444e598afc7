"""The rendezvous of the ranks: the small HTTP key-value store that Horovod's Gloo expects.

    PUT /scope/key      stores the body
    GET /scope/key      returns the body, or 404 while it doesn't exist: Gloo then asks again
    DELETE /scope/rank  says that the rank is done with the scope; when the last one is, its keys
                        are deleted, so that ranks that shut Horovod down and start it again don't
                        read the addresses of the first time

It listens on the loopback address only, on a port that the kernel picks. In a job of several hosts
each launcher has a store for its own ranks. What a rank puts there goes to all stores through the
first host's launcher, which decides on the order (`publish`).

The protocol has no password, and other users of the same machine can reach the port. But Horovod
builds its addresses by joining text: http://ADDR:PORT/SCOPE/KEY. So ADDR contains a path that
nobody can guess, `127.0.0.1:PORT/TOKEN`. A client that doesn't know the path is refused, and
everything that the server accepts is bounded.
"""

from __future__ import annotations

import hmac
import secrets
import socketserver
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from collective.job.gloo_address import LOOPBACK
from collective.job.hosts import Placement

# A rank puts the addresses at which it listens: one per other rank, some hundred bytes each.
MOST_VALUE_BYTES = 2 << 20
_MOST_NAME_CHARACTERS = 512
_KEYS_A_RANK = 64  # in all scopes together
_LEAST_CONNECTIONS = 256  # open at the same time, each with a thread


class Entry(NamedTuple):
    """Describes what a rank did: it put a value, or (None) finished with the scope."""

    scope: str
    key: str
    value: bytes | None


def scope_members(places: tuple[Placement, ...]) -> dict[str, int]:
    """Returns how many ranks each of Horovod's scopes has.

    The scopes are "global", "local_HOST" with the ranks of a host, and "cross_LOCAL_RANK" with one
    rank of each host.
    """
    members = {"global": len(places)}
    for place in places:
        members[f"local_{place.host}"] = place.local_size
        members[f"cross_{place.local_rank}"] = place.cross_size
    return members


def gloo_address_of(address: str, port: int, token: str) -> str:
    """Returns the "address" of a rendezvous for Horovod, which includes the path."""
    return f"{address}:{port}/{token}"


class KeyValueStore(ThreadingHTTPServer):
    """Stores the values.

    The port exists, and requests queue, from its creation; `serve` answers them.

    Attributes:
        port: the port on which it listens.
        address: its "address" for Horovod.
        path: the beginning of every path that Horovod then requests.
    """

    daemon_threads = True
    request_queue_size = 128  # all ranks ask at the same time

    def __init__(
        self,
        members: Mapping[str, int],
        publish: Callable[[Entry], None] | None = None,
        address: str = LOOPBACK,
        port: int = 0,
        token: str = "",
    ) -> None:
        """Starts to listen.

        Args:
            members: how many ranks each scope has, as `scope_members` returns them.
            publish: called, from any thread, with what a rank did instead of doing it; the
                publisher then calls `apply` on all hosts in the same order. None: it is done at
                once.
            address: the address at which to listen.
            port: the port; 0 lets the kernel choose.
            token: a text that nobody can guess; "" makes one.
        """
        super().__init__((address, port), _Handler)
        self.port: int = self.server_address[1]
        token = token or secrets.token_hex(16)
        self.address = gloo_address_of(address, self.port, token)
        self.path = f"/{token}:{self.port}/"
        self._members = members
        self._publish = self.apply if publish is None else publish
        self._lock = threading.Lock()
        self._values: dict[str, dict[str, bytes]] = defaultdict(dict)
        self._departed: dict[str, set[str]] = defaultdict(set)
        size = members["global"]
        self._most_keys = _KEYS_A_RANK * size + 1024
        self._connections = threading.Semaphore(max(_LEAST_CONNECTIONS, 8 * size))

    def server_bind(self) -> None:
        """Skips the base class's look-up of the host's name, which may ask a name server."""
        socketserver.TCPServer.server_bind(self)

    def serve(self) -> None:
        """Starts answering, in a thread that doesn't keep the process alive."""
        threading.Thread(target=self.serve_forever, name="rendezvous", daemon=True).start()

    def stop(self) -> None:
        """Stops answering."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Gives a connection its thread. One too many is closed, and its rank asks again."""
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers a connection in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing: a rank that was killed in the middle of a request is reported elsewhere."""

    def take(self, entry: Entry) -> bool:
        """Takes what a rank did; returns whether there was room for it."""
        with self._lock:
            keys = sum(map(len, self._values.values())) + sum(map(len, self._departed.values()))
        if keys >= self._most_keys:
            return False
        self._publish(entry)
        return True

    def apply(self, entry: Entry) -> None:
        """Carries out here what a rank did."""
        if entry.value is None:
            self._leave(entry.scope, entry.key)
        else:
            with self._lock:
                self._values[entry.scope][entry.key] = entry.value

    def get(self, scope: str, key: str) -> bytes | None:
        with self._lock:
            return self._values[scope].get(key) if scope in self._values else None

    def _leave(self, scope: str, key: str) -> None:
        # The store doesn't know how many members the scope of a process set has, or the scope of a
        # host without a launcher: each DELETE then removes only the named key.
        members = self._members.get(scope)
        with self._lock:
            if members is None:
                self._values[scope].pop(key, None)
                return
            self._departed[scope].add(key)
            if len(self._departed[scope]) >= members:
                self._values.pop(scope, None)
                self._departed.pop(scope)


class _Handler(BaseHTTPRequestHandler):
    server: KeyValueStore
    # A client that stops in the middle of a request holds a thread for at most this many seconds.
    timeout = 30

    def parse_request(self) -> bool:
        """Refuses clients that don't know the path."""
        if not super().parse_request():
            return False
        start = self.path[: len(self.server.path)].encode("utf-8", "replace")
        if not hmac.compare_digest(start, self.server.path.encode()):
            self._answer(403)
            return False
        self.path = self.path[len(self.server.path) :]
        return True

    def do_GET(self) -> None:
        value = self.server.get(*self._scope_and_key())
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or len(length) > 9:
            self._answer(411)
        elif int(length) > MOST_VALUE_BYTES:
            self._answer(413)
        else:
            value = self.rfile.read(int(length))
            if len(value) == int(length):  # else the rank was killed during the request
                self._take(value)

    def do_DELETE(self) -> None:
        self._take(None)

    def _take(self, value: bytes | None) -> None:
        scope, key = self._scope_and_key()
        if len(scope) + len(key) > _MOST_NAME_CHARACTERS:
            self._answer(414)
        else:
            self._answer(200 if self.server.take(Entry(scope, key, value)) else 507)

    def _scope_and_key(self) -> tuple[str, str]:
        scope, _, key = self.path.partition("/")
        return scope, key

    def _answer(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Writes nothing: a line for every request would drown the ranks' own output."""
