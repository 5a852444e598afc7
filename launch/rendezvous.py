"""Where ranks find each other: the small HTTP key-value store that Horovod's Gloo expects.

    PUT /scope/key      stores the body
    GET /scope/key      the body, 404 while it isn't there: Gloo then asks again
    DELETE /scope/rank  that rank is done with the scope; when the last one is, its keys go, so that
                        ranks that shut Horovod down and start it again don't read the addresses of
                        the first time

It listens on the loopback address only, on a port that the kernel picks. The protocol knows no
password: other users of the same machine can reach it.
"""

from __future__ import annotations

import socketserver
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from .environment import LOOPBACK


class Rendezvous(ThreadingHTTPServer):
    """The store. Its port is known, and requests queue, from its creation; `serve` answers them."""

    daemon_threads = True
    request_queue_size = 128  # every rank asks at once

    def __init__(self, size: int):
        super().__init__((LOOPBACK, 0), _Handler)
        self.port: int = self.server_address[1]
        self._size = size
        self._lock = threading.Lock()
        self._values: dict[str, dict[str, bytes]] = defaultdict(dict)
        self._done: dict[str, set[str]] = defaultdict(set)

    def server_bind(self) -> None:
        """Skips the base class's look-up of the host's name, which may ask a name server."""
        socketserver.TCPServer.server_bind(self)

    def serve(self) -> None:
        """Starts answering, in a thread that doesn't keep the process alive."""
        threading.Thread(target=self.serve_forever, name="rendezvous", daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """A rank that was killed in the middle of a request is told about elsewhere."""

    def put(self, scope: str, key: str, value: bytes) -> None:
        with self._lock:
            self._values[scope][key] = value

    def get(self, scope: str, key: str) -> bytes | None:
        with self._lock:
            return self._values[scope].get(key)

    def leave(self, scope: str, key: str) -> None:
        # Horovod's scopes: "global" and "local_HOST" of all ranks, "cross_LOCAL_RANK" of one rank
        # of each machine. The members of other scopes, those of process sets, aren't known here:
        # they lose what they name only.
        members = 1 if scope.startswith("cross_") else self._size
        known = scope == "global" or scope.startswith(("local_", "cross_"))
        with self._lock:
            self._done[scope].add(key)
            if not known:
                self._values[scope].pop(key, None)
            elif len(self._done[scope]) >= members:
                self._values.pop(scope, None)
                self._done.pop(scope)


class _Handler(BaseHTTPRequestHandler):
    server: Rendezvous
    # a client that stops in the middle of a request holds a thread no longer than this
    timeout = 30

    def do_GET(self) -> None:
        value = self.server.get(*self._place())
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        self.server.put(*self._place(), self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(200)

    def do_DELETE(self) -> None:
        self.server.leave(*self._place())
        self._answer(200)

    def _place(self) -> tuple[str, str]:
        scope, _, key = self.path.lstrip("/").partition("/")
        return scope, key

    def _answer(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Every request on stderr would drown the ranks' own output."""
