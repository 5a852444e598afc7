"""The rendezvous of the ranks: the small HTTP key-value store that Horovod's Gloo expects.

    PUT /scope/key      stores the body
    GET /scope/key      returns the body, or 404 while it isn't there: Gloo then asks again
    DELETE /scope/rank  says that the rank is done with the scope; when the last one is, its keys
                        go, so that ranks that shut Horovod down and start it again don't read the
                        addresses of the first time

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
    """Stores the values.

    It has a port, at which requests queue, from its creation; `serve` answers them.
    """

    daemon_threads = True
    request_queue_size = 128  # every rank asks at once

    def __init__(self, size: int) -> None:
        super().__init__((LOOPBACK, 0), _Handler)
        self.port: int = self.server_address[1]
        self._size = size
        self._lock = threading.Lock()
        self._values: dict[str, dict[str, bytes]] = defaultdict(dict)
        self._departed: dict[str, set[str]] = defaultdict(set)

    def server_bind(self) -> None:
        """Skips the base class's look-up of the host's name, which may ask a name server."""
        socketserver.TCPServer.server_bind(self)

    def serve(self) -> None:
        """Starts answering, in a thread that doesn't keep the process alive."""
        threading.Thread(target=self.serve_forever, name="rendezvous", daemon=True).start()

    def stop(self) -> None:
        """Answers no more."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing: a rank that was killed in the middle of a request is reported elsewhere."""

    def put(self, scope: str, key: str, value: bytes) -> None:
        with self._lock:
            self._values[scope][key] = value

    def get(self, scope: str, key: str) -> bytes | None:
        with self._lock:
            return self._values[scope].get(key)

    def leave(self, scope: str, key: str) -> None:
        # Horovod's scopes: "global" and "local_HOST" have all ranks, "cross_LOCAL_RANK" one rank of
        # each machine. How many members the scope of a process set has isn't known here: each
        # DELETE then removes the named key only.
        members = 1 if scope.startswith("cross_") else self._size
        known = scope == "global" or scope.startswith(("local_", "cross_"))
        with self._lock:
            self._departed[scope].add(key)
            if not known:
                self._values[scope].pop(key, None)
            elif len(self._departed[scope]) >= members:
                self._values.pop(scope, None)
                self._departed.pop(scope)


class _Handler(BaseHTTPRequestHandler):
    server: Rendezvous
    # A client that stops in the middle of a request holds a thread for so many seconds at most.
    timeout = 30

    def do_GET(self) -> None:
        value = self.server.get(*self._scope_and_key())
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        self.server.put(
            *self._scope_and_key(), self.rfile.read(int(self.headers["Content-Length"]))
        )
        self._answer(200)

    def do_DELETE(self) -> None:
        self.server.leave(*self._scope_and_key())
        self._answer(200)

    def _scope_and_key(self) -> tuple[str, str]:
        scope, _, key = self.path.lstrip("/").partition("/")
        return scope, key

    def _answer(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Writes nothing: a line for every request would drown the ranks' own output."""
