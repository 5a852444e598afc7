"""Reads a rank's parts of the global batches of all streams, from any of them on, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from collective.data.batches.batch import Batch
from collective.data.batches.packed_batch import PackedBatch
from collective.data.streams import protocol
from collective.data.streams.loader_connection import LoaderConnection, StreamError
from collective.data.streams.stream_order import place_of, used_before
from collective.ops.counting import counted

Place = tuple[int, int]  # a stream, and a batch's number there


class StreamReader:
    """Takes batches from the loaders that have the streams.

    Args:
        addresses: of the loaders, in the order of their streams.
        name: of the batches.
        key: the loaders have the same.
        rank, ranks: whose parts.
        timeout: seconds that a loader may be out of reach.
        ahead: how many batches are asked for at a time.
        batch_size: the samples of a batch, except for each stream's last; None: any number.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        name: str,
        key: bytes,
        rank: int = 0,
        ranks: int = 1,
        timeout: float = 60.0,
        ahead: int = 2,
        batch_size: int | None = None,
    ):
        self._addresses, self._name, self._key = list(addresses), name, key
        self._rank, self._ranks, self._timeout = rank, ranks, timeout
        self._ahead, self._batch_size = ahead, batch_size

    def example(self) -> Batch:
        """Returns one sample, with the names and types of all.

        Raises:
            StreamError: a loader can't give it, or no stream has any.
        """
        for stream, connection in enumerate(self._connections()):
            _, batch = connection.ask(self._request(protocol.EXAMPLE, stream))
            if batch is not None:
                return batch.unpacked()
        raise StreamError(
            f"{self._name!r}: no stream of the loaders at {', '.join(self._addresses)} has a batch."
        )

    def batches(self, first: int = 0) -> Iterator[Batch]:
        """Yields this rank's parts of the global batches from number `first` on.

        Raises:
            StreamError: as for `packed`.
        """
        for batch in self.packed(first):
            yield batch.unpacked()

    def packed(self, first: int = 0) -> Iterator[PackedBatch]:
        """Yields this rank's parts of the global batches from number `first` on, packed.

        Raises:
            StreamError: see `LoaderConnection.ask`; or a batch has another size than it may.
        """
        connections, fetchers = self._connections(), _Fetchers(self._ahead)
        fetches: dict[Place, _Fetch] = {}
        lengths: dict[int, int] = {}
        small: dict[int, int] = {}  # the size of a stream's batch that can only be its last
        try:
            if first:
                self._find_ends(first, connections, lengths)
            number = int(first)
            while True:
                place = place_of(number, len(connections), lengths)
                if place is None:
                    return
                for each in range(number, number + self._ahead):
                    coming = place_of(each, len(connections), lengths)
                    if coming is not None and coming not in fetches:
                        request = self._request(protocol.BATCH, *coming)
                        fetches[coming] = fetchers.ask(connections[coming[0]], request)
                about, batch = fetches.pop(place).result()
                if batch is None:  # the stream's end; others may go on
                    lengths[place[0]] = place[1]
                    continue
                self._check_size(place, int(about["samples"]), small)
                number += 1
                yield batch
        finally:
            for connection in connections:
                connection.close()
            fetchers.close()

    def _find_ends(
        self, first: int, connections: Sequence[LoaderConnection], lengths: dict[int, int]
    ) -> None:
        """Finds the streams that have ended before a global batch, whose number depends on that."""
        while len(connections) > 1:
            place = place_of(first, len(connections), lengths)
            if place is None:
                return
            unknown = {
                stream: used
                for stream, used in used_before(place, len(connections), lengths).items()
                if used and stream not in lengths
            }
            for stream, used in unknown.items():
                request = self._request(protocol.COUNT, stream, used)
                about, _ = connections[stream].ask(request)
                if int(about["count"]) < used:
                    lengths[stream] = int(about["count"])
                    break
            else:
                return

    def _check_size(self, place: Place, samples: int, small: dict[int, int]) -> None:
        if self._batch_size is None:
            return
        stream, number = place
        if stream not in small and samples <= self._batch_size:
            if samples < self._batch_size:
                small[stream] = samples
            return
        size = counted(small.get(stream, samples), "sample")
        which = number - 1 if stream in small else number
        raise StreamError(
            f"the loader at {self._addresses[stream]}: batch {which} of stream {stream} has "
            f"{size}, and stream(batch_size={self._batch_size}) says otherwise; only a stream's "
            "last batch may be smaller."
        )

    def _request(self, ask: str, stream: int, number: int = 0) -> protocol.Request:
        streams = len(self._addresses)
        return protocol.Request(ask, self._name, stream, streams, number, self._rank, self._ranks)

    def _connections(self) -> list[LoaderConnection]:
        return [LoaderConnection(each, self._key, self._timeout) for each in self._addresses]


class _Fetch:
    """A request that a thread of `_Fetchers` asks."""

    def __init__(self, connection: LoaderConnection, request: protocol.Request):
        self._connection, self._request = connection, request
        self._is_done = threading.Event()
        self._result: tuple[dict[str, Any], PackedBatch | None] | None = None
        self._error: BaseException | None = None

    def ask(self) -> None:
        """Asks the loader; `result` has what came of it."""
        try:
            self._result = self._connection.ask(self._request)
        except BaseException as error:
            self._error = error
        self._is_done.set()

    def result(self) -> tuple[dict[str, Any], PackedBatch | None]:
        """Waits for the reply."""
        self._is_done.wait()
        if self._result is None:
            assert self._error is not None
            raise self._error
        return self._result


class _Fetchers:
    """Threads that ask, in the order of the requests. They keep no process from ending.

    A thread for each request would cost as much as the request.
    """

    def __init__(self, count: int):
        self._queue: queue.SimpleQueue[_Fetch | None] = queue.SimpleQueue()
        self._count = count
        for _ in range(count):
            threading.Thread(target=self._work, name="stream", daemon=True).start()

    def ask(self, connection: LoaderConnection, request: protocol.Request) -> _Fetch:
        """Has a request asked as soon as a thread is free."""
        fetch = _Fetch(connection, request)
        self._queue.put(fetch)
        return fetch

    def close(self) -> None:
        """Ends the threads after the requests that they have."""
        for _ in range(self._count):
            self._queue.put(None)

    def _work(self) -> None:
        while (fetch := self._queue.get()) is not None:
            fetch.ask()
            del fetch  # its batch would live until the next request
