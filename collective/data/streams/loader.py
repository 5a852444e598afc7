"""A loader: a process that makes a stream's batches, and serves them to the ranks."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from collective.data import arrow
from collective.data.batches.batch import Batch
from collective.data.batches.packed_batch import pack
from collective.data.streams import protocol
from collective.data.streams.numbered_batches import LoaderError, NumberedBatches
from collective.job import streams
from collective.ops.counting import counted
from collective.policy import is_whole

StreamBatches = Callable[[int, int, int], Iterable[Batch]]
DEFAULT_NAME = "data"
# How many seconds a call waits for a batch; the rank then asks again, and knows the loader lives.
_PATIENCE = 2.0
# How many seconds a loader may take to end.
_GRACE = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve_stream(
    batches: StreamBatches | Mapping[str, StreamBatches],
    *,
    address: str | None = None,
    window: int = 16,
    ahead: int = 4,
) -> None:
    """Serves this loader's stream of batches to the ranks, until the process is told to stop.

        def batches(stream, streams, first):  # of stream 0, 1, … of so many, from number `first` on
            for number in range(first, 1000):
                yield make_batch(number * streams + stream)  # a collective.data.Batch

        collective.data.serve_stream(batches)

    `collective launch --data-loaders 2 loader.py train.py` starts two such programs, and restarts
    them; `collective.data.stream()` in train.py takes their batches. A batch has the samples of all
    ranks of a step.

    **The contract.** `batches` can begin at any number, and a number always stands for the same
    batch. Ranks go back to the number of their checkpoint after a restart, and a restarted loader
    begins at the number that is asked for: this, and nothing that a loader remembers, makes every
    sample come once. Seed what is random by (stream, number). The stream ends where the iterator
    does.

    TERM, INT and HUP end it: it returns, or, if a call of the function stands still, the process
    exits five seconds later with 128 and the signal's number. It loads no TensorFlow.

    Args:
        batches: the function, or several by the `name` that `collective.data.stream` asks for; one
            alone is called 'data'.
        address: HOST:PORT at which to listen; '0.0.0.0:7000' is on all interfaces. Default: this
            loader's address in COLLECTIVE_LOADERS, as `collective launch` and manifests set it
            (there, a host that isn't loopback stands for all interfaces).
        window: how many batches before the last one that was asked for are kept. A rank that asks
            for an earlier one has `batches` begin again there.
        ahead: how many batches are made before they are asked for; then the loader waits.

    Raises:
        ImportError: pyarrow isn't installed.
        TypeError: `batches` isn't a function or a dict of them.
        ValueError: an argument is invalid, or there is no address.
        collective.job.errors.UsageError: the job's secret can't be read.
        OSError: the address can't be used.
    """
    named = _by_name(batches)
    for argument, value in (("window", window), ("ahead", ahead)):
        if not (is_whole(value) and value >= 1):
            raise ValueError(f"serve_stream({argument}={value!r}): it is a whole number from 1.")
    place, number, count = _place(address, os.environ)
    key = streams.stream_key(os.environ)
    with _handled_signals() as wait_for_one:
        with LoaderServer(named, place, key, number, count, window, ahead) as server:
            print(
                f"this loader serves stream {number} of {count}, {', '.join(map(repr, named))}, at "
                f"{server.address}",
                file=sys.stderr,
                flush=True,
            )
            told = wait_for_one()
            # gRPC waits for its calls, in which a function may stand still, also as Python exits.
            last_resort = threading.Timer(_GRACE, _end_at_once, [told])
            last_resort.daemon = True
            last_resort.start()
    last_resort.cancel()


def _end_at_once(number: signal.Signals) -> None:
    print(
        f"this loader was told to stop by {number.name} {_GRACE:.0f} s ago, and ends at once: a "
        "call stands still, of its function or in gRPC",
        file=sys.stderr,
        flush=True,
    )
    os._exit(128 + number)


@contextlib.contextmanager
def _handled_signals() -> Iterator[Callable[[], signal.Signals]]:
    """Handles the signals that end a loader, and gives a function that waits for one.

    Python writes their numbers into a pipe. A main thread that waits for a lock would miss a signal
    that comes just before, or that the kernel gives to another thread.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    others = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def wait() -> signal.Signals:
        while True:
            (number,) = os.read(reading, 1)
            if number in _SIGNALS:  # not a signal of the user's own
                return signal.Signals(number)

    try:
        yield wait
    finally:
        signal.set_wakeup_fd(others)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


class LoaderServer:
    """Serves a stream over Arrow Flight while it is open.

    Attributes:
        address: HOST:PORT, with the port that was found if 0 was asked for.

    Args:
        batches: functions by name.
        address: HOST:PORT at which to listen; port 0 is any free one.
        key: ranks have the same.
        stream, streams: which of how many streams this one is.
        window, ahead: see `serve_stream`.
    """

    def __init__(
        self,
        batches: Mapping[str, StreamBatches],
        address: str,
        key: bytes,
        stream: int = 0,
        streams: int = 1,
        window: int = 16,
        ahead: int = 4,
    ):
        flight, pyarrow = arrow.module("flight"), arrow.module()
        self._place = stream, streams
        self._batches = {
            name: NumberedBatches(functools.partial(make, stream, streams), window, ahead)
            for name, make in batches.items()
        }
        answer = self._answer

        class Server(flight.FlightServerBase):  # type: ignore[name-defined]
            def do_get(self, context: Any, ticket: Any) -> Any:
                """Answers a request."""
                del context
                try:
                    return answer(protocol.Request.decode(ticket.ticket))
                except ValueError as error:
                    raise flight.FlightServerError(f"malformed request: {error}") from None

        loader_side, _ = protocol.handlers()
        try:
            self._server = Server(f"grpc+tcp://{address}", auth_handler=loader_side(key))
        except (pyarrow.ArrowException, OSError) as error:
            text = str(error).splitlines()[0]
            raise OSError(f"a loader can't listen at {address}: {text}") from None
        self.address = f"{address.rpartition(':')[0]}:{self._server.port}"

    def __enter__(self) -> LoaderServer:
        return self

    def __exit__(self, *_: object) -> None:
        for numbered in self._batches.values():  # calls that wait for one are answered at once
            numbered.close()
        self._server.shutdown()

    def _answer(self, request: protocol.Request) -> Any:
        if (request.stream, request.streams) != self._place:
            stream, count = self._place
            return protocol.reply(
                protocol.FAILED,
                text=f"it has stream {stream} of {count}, and was asked for stream "
                f"{request.stream} of {request.streams}: give loaders and ranks the same "
                f"{streams.LOADERS}",
            )
        numbered = self._batches.get(request.name)
        if numbered is None:
            return protocol.reply(
                protocol.FAILED,
                text=f"it has no batches {request.name!r}, but "
                f"{', '.join(map(repr, self._batches))}",
            )
        try:
            if request.ask == protocol.COUNT:
                return protocol.reply(protocol.COUNT, count=numbered.count(request.number))
            if request.ask == protocol.EXAMPLE:
                batch = numbered.first_batch()
                if batch is None:
                    return protocol.reply(protocol.ENDED)
                return protocol.reply(protocol.BATCH, pack(batch, 0, 1), samples=1)
            return self._batch(numbered, request)
        except TimeoutError:
            return protocol.reply(protocol.WAITING)
        except LoaderError as error:
            return protocol.reply(protocol.FAILED, text=str(error))

    @staticmethod
    def _batch(numbered: NumberedBatches, request: protocol.Request) -> Any:
        batch = numbered.take(request.number, _PATIENCE)
        if batch is None:
            return protocol.reply(protocol.ENDED)
        if len(batch) < request.ranks:
            return protocol.reply(
                protocol.FAILED,
                text=f"batch {request.number} has {counted(len(batch), 'sample')}, and each of "
                f"{counted(request.ranks, 'rank')} needs one: let the loader leave out such a "
                "remainder, or join it to the batch before",
            )
        own = protocol.share(len(batch), request.rank, request.ranks)
        return protocol.reply(protocol.BATCH, pack(batch, *own), samples=len(batch))


def _by_name(batches: Any) -> dict[str, StreamBatches]:
    named = dict(batches) if isinstance(batches, Mapping) else {DEFAULT_NAME: batches}
    for name, make in named.items():
        if not (isinstance(name, str) and name and callable(make)):
            raise TypeError(
                "serve_stream() takes a function batches(stream, streams, first), or a dict of "
                f"them by name, not {make!r} as {name!r}."
            )
    if not named:
        raise ValueError("serve_stream({}): it has no batches.")
    return named


def _place(address: str | None, environment: Mapping[str, str]) -> tuple[str, int, int]:
    """Returns where to listen, and which of how many streams this loader has."""
    listed = environment.get(streams.LOADERS)
    if not listed:
        if address is None:
            raise ValueError(
                f"serve_stream(): there is no {streams.LOADERS} in the environment. Start it by "
                "`collective launch --data-loaders 1 loader.py train.py`, or say where it listens: "
                "serve_stream(batches, address='0.0.0.0:7000')."
            )
        _check_listening(address)
        return address, 0, 1
    addresses = streams.loader_addresses(listed)
    text = environment.get(streams.LOADER, "0" if len(addresses) == 1 else "")
    if not (text.isdigit() and int(text) < len(addresses)):
        raise ValueError(
            f"{streams.LOADER}={text!r}: it says which of {counted(len(addresses), 'address')} in "
            f"{streams.LOADERS} is this loader's, from 0."
        )
    number = int(text)
    if address is not None:
        _check_listening(address)
        return address, number, len(addresses)
    host, port = streams.split_address(addresses[number])
    is_loopback = host in ("localhost", "::1") or host.startswith("127.")
    return (addresses[number] if is_loopback else f"0.0.0.0:{port}"), number, len(addresses)


def _check_listening(address: Any) -> None:
    try:
        streams.loader_addresses([address])
    except (AttributeError, ValueError):
        raise ValueError(f"serve_stream(address={address!r}): it is HOST:PORT.") from None
