"""A rank's connection to a loader, which outlives the loader's restarts."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from collective.data import arrow
from collective.data.batches.packed_batch import PackedBatch
from collective.data.streams import protocol

_PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0)  # seconds between attempts to reach a loader
# How many seconds a call may take; a loader says within two that it needs longer.
_SHORTEST_CALL, _LONGEST_CALL = 5.0, 30.0
_WARN_AFTER = 60.0
# A loader that answers but has no batch gets so many times the patience for one that doesn't.
_PATIENCE_FOR_WORK = 10
_OPTIONS = [
    # Each client has a connection of its own, and tries again at once when a loader is back.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]


class StreamError(Exception):
    """Says what keeps a stream from going on, and names the loader."""


class LoaderConnection:
    """Asks a loader, for as long as it may take. Threads may use it at the same time.

    Args:
        address: HOST:PORT of the loader.
        key: the loader has the same.
        timeout: seconds that it may be out of reach.
    """

    def __init__(self, address: str, key: bytes, timeout: float):
        self._address, self._key, self._timeout = address, key, timeout
        self._lock = threading.Lock()
        self._client: Any = None
        self._is_closed = False

    def ask(self, request: protocol.Request) -> tuple[dict[str, Any], PackedBatch | None]:
        """Returns what the loader replies.

        Raises:
            StreamError: it can't be reached for too long, has another secret, refuses the request,
                or can't make the batch.
        """
        what = f"stream {request.stream}, {request.name!r}"
        if request.ask == protocol.BATCH:
            what = f"batch {request.number} of {what}"
        began = reached = time.monotonic()
        warned = began
        failures = 0
        while not self._is_closed:
            try:
                about, batch = self._call(request)
            except _unreachable() as error:
                now = time.monotonic()
                if now - reached > self._timeout:
                    raise StreamError(
                        f"the loader at {self._address} has been out of reach for "
                        f"{now - reached:.0f} s, and {what} is its: {_words(error)}. Look at its "
                        "output, or give stream(timeout=…) more seconds."
                    ) from None
                time.sleep(_PAUSES[min(failures, len(_PAUSES) - 1)])
                failures += 1
                continue
            except (ValueError, _refused()) as error:
                raise StreamError(f"the loader at {self._address}: {_words(error)}") from None
            failures, reached = 0, time.monotonic()
            if about["state"] == protocol.FAILED:
                raise StreamError(f"the loader at {self._address}, {what}: {about.get('text')}")
            if about["state"] != protocol.WAITING:
                return about, batch
            if reached - began > _PATIENCE_FOR_WORK * self._timeout:
                raise StreamError(
                    f"the loader at {self._address} answers, but hasn't made {what} in "
                    f"{reached - began:.0f} s: its function stands still, or stream(timeout=…) is "
                    f"too short, which allows {_PATIENCE_FOR_WORK} times as many seconds for that."
                )
            if reached - warned > _WARN_AFTER:
                warned = reached
                print(
                    f"stream: has waited {reached - began:.0f} s for {what} of the loader at "
                    f"{self._address}",
                    file=sys.stderr,
                    flush=True,
                )
        raise StreamError(f"the connection to the loader at {self._address} is closed")

    def close(self) -> None:
        """Lets no request begin any more."""
        self._is_closed = True

    def _call(self, request: protocol.Request) -> tuple[dict[str, Any], PackedBatch | None]:
        flight = arrow.module("flight")
        options = flight.FlightCallOptions(
            timeout=min(_LONGEST_CALL, max(_SHORTEST_CALL, self._timeout))
        )
        client = self._connected(options)
        try:
            return protocol.read_reply(client.do_get(flight.Ticket(request.encode()), options))
        except flight.FlightUnauthenticatedError as error:
            # A restarted loader doesn't know the tokens that it gave before.
            self._forget(client)
            raise flight.FlightUnavailableError(_words(error)) from None
        except _unreachable():
            self._forget(client)
            raise

    def _connected(self, options: Any) -> Any:
        flight = arrow.module("flight")
        with self._lock:
            if self._client is not None:
                return self._client
            client = flight.connect(f"grpc+tcp://{self._address}", generic_options=_OPTIONS)
            _, rank_side = protocol.handlers()
            try:
                client.authenticate(rank_side(self._key), options)
            except flight.FlightUnauthenticatedError as error:
                raise StreamError(
                    f"the loader at {self._address} and this rank don't know each other: "
                    f"{_words(error)}. Give both the same secret: COLLECTIVE_SECRET, or "
                    "COLLECTIVE_SECRET_FILE; `collective launch --data-loaders` does that itself."
                ) from None
            self._client = client
            return client

    def _forget(self, client: Any) -> None:
        with self._lock:
            if self._client is client:
                self._client = None


def _unreachable() -> tuple[type[Exception], ...]:
    """Returns the errors after which another attempt may succeed."""
    flight = arrow.module("flight")
    return (
        flight.FlightUnavailableError,
        flight.FlightTimedOutError,
        flight.FlightCancelledError,
        flight.FlightInternalError,
        OSError,
    )


def _refused() -> type[Exception]:
    error: type[Exception] = arrow.module("flight").FlightError
    return error


def _words(error: BaseException) -> str:
    """Returns what Arrow says, without what it says of itself."""
    text = str(error).partition(". gRPC client debug context")[0]
    text = text.partition(". Detail:")[0].partition("with message: ")[2] or text
    return " ".join(text.split())[:300]
