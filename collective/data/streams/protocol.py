"""What a rank and a loader tell each other, over Arrow Flight.

A rank's request is the ticket of a DoGet, in JSON:

    {"ask": "batch", "name": "data", "stream": 0, "streams": 2, "number": 7, "rank": 1, "ranks": 4}
    {"ask": "count", …, "number": 7}      how many batches the stream has, up to 7
    {"ask": "example", …}                 one sample, which shows names and types

The reply's schema says in its metadata, under `collective.stream`, what it is: {"state": …}

    batch     a part of a batch follows, packed; "samples" is how many the whole one has
    ended     the stream has fewer batches
    waiting   the loader is working on it: ask again
    count     "count" is the number
    failed    "text" says why

A packed batch is a record batch of one row: its arrays' bytes, in columns of large_binary, after
those of its counts; its layout and meta bytes are in the schema's metadata.

Neither side sends the key. Each proves that it has it by a digest of it and of both sides' random
numbers; calls then carry a token that the loader gave. Data aren't encrypted.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import hmac
import json
import secrets
from typing import Any

import numpy as np

from collective.data import arrow
from collective.data.batches.packed_batch import PackedBatch, types_of

BATCH, COUNT, EXAMPLE = "batch", "count", "example"
ENDED, WAITING, FAILED = "ended", "waiting", "failed"
WRONG_KEY = "the secrets differ"
_STATE = b"collective.stream"
_LAYOUT, _META = b"collective.stream.layout", b"collective.stream.meta"
_NONCE_BYTES = 32
_MOST = 1 << 62


@dataclasses.dataclass(frozen=True)
class Request:
    """Asks a loader for something of a stream.

    Attributes:
        ask: BATCH, COUNT or EXAMPLE.
        name: of the loader's batches.
        stream, streams: which of how many streams the loader is thought to have.
        number: of the batch; with COUNT how far to count.
        rank, ranks: whose part of the batch.
    """

    ask: str
    name: str
    stream: int
    streams: int
    number: int = 0
    rank: int = 0
    ranks: int = 1

    def encode(self) -> bytes:
        """Returns the bytes of the ticket."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def decode(cls, ticket: bytes) -> Request:
        """Returns the request of a ticket.

        Raises:
            ValueError: it isn't one. The message says why.
        """
        try:
            fields = json.loads(ticket)
        except (ValueError, RecursionError):
            raise ValueError("the ticket isn't JSON") from None
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(fields, dict) or set(fields) != set(names):
            raise ValueError(f"the ticket isn't an object with {', '.join(names)}")
        if fields["ask"] not in (BATCH, COUNT, EXAMPLE) or not isinstance(fields["name"], str):
            raise ValueError(f"it asks for {fields['ask']!r} of {fields['name']!r}")
        for name in names[2:]:
            if type(fields[name]) is not int or not 0 <= fields[name] < _MOST:
                raise ValueError(f"{name} is {fields[name]!r}, no number from 0")
        request = cls(**fields)
        for name in ("stream", "rank"):
            if fields[name] >= fields[f"{name}s"]:
                raise ValueError(f"{name} {fields[name]} of {fields[f'{name}s']} doesn't exist")
        return request


def share(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Returns a rank's samples of a batch of a size, as the first one and the one after the last.

    They follow each other, and no two ranks' overlap.
    """
    return size * rank // ranks, size * (rank + 1) // ranks


def reply(state: str, batch: PackedBatch | None = None, **more: Any) -> Any:
    """Returns a reply, as the function of a DoGet does."""
    flight, pyarrow = arrow.module("flight"), arrow.module()
    about = json.dumps({"state": state, **more}).encode()
    if batch is None:
        schema, batches = pyarrow.schema([], {_STATE: about}), []
    else:
        columns = [_bytes_of(array) for array in (batch.counts, *batch.arrays)]
        fields = [
            pyarrow.field(str(number), column.type, nullable=False)
            for number, column in enumerate(columns)
        ]
        metadata = {_STATE: about, _LAYOUT: batch.layout, _META: batch.meta}
        schema = pyarrow.schema(fields, metadata)
        batches = [pyarrow.record_batch(columns, schema=schema)]
    return flight.RecordBatchStream(pyarrow.RecordBatchReader.from_batches(schema, batches))


def read_reply(reader: Any) -> tuple[dict[str, Any], PackedBatch | None]:
    """Returns what a reply says, and its batch. The batch's arrays are views of the message.

    Raises:
        ValueError: it is no reply of a loader.
    """
    metadata = reader.schema.metadata or {}
    try:
        about = json.loads(metadata[_STATE])
        state = about["state"]
    except (KeyError, TypeError, ValueError):
        raise ValueError("its reply isn't one of collective.data.serve_stream()") from None
    if state != BATCH:
        return about, None
    batches = [chunk.data for chunk in reader]
    if len(batches) != 1 or batches[0].num_rows != 1 or _LAYOUT not in metadata:
        raise ValueError("its reply hasn't exactly one packed batch")
    layout = metadata[_LAYOUT]
    types = (np.dtype(np.int64), *types_of(layout))
    if len(types) != batches[0].num_columns:
        raise ValueError("its reply has another number of arrays than its layout says")
    counts, *arrays = (
        np.frombuffer(column[0].as_buffer(), dtype)
        for column, dtype in zip(batches[0].columns, types)
    )
    return about, PackedBatch(layout, counts, tuple(arrays), metadata.get(_META, b""))


def _bytes_of(array: np.ndarray) -> Any:
    """Returns a column with an array's bytes, which aren't copied."""
    pyarrow = arrow.module()
    data = pyarrow.py_buffer(np.ascontiguousarray(array).view(np.uint8))
    ends = pyarrow.py_buffer(np.array([0, data.size], np.int64))
    return pyarrow.Array.from_buffers(pyarrow.large_binary(), 1, [None, ends, data])


# ---- The proof of the key


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.new(key, role + b"\0" + nonces, hashlib.sha256).digest()


@functools.cache
def handlers() -> tuple[type, type]:
    """Returns the classes of the loader's and of the rank's side; each takes the key."""
    flight = arrow.module("flight")

    class LoaderSide(flight.ServerAuthHandler):  # type: ignore[name-defined]
        """Checks a rank's proof, and gives it a token for its calls."""

        def __init__(self, key: bytes):
            super().__init__()
            self._key = key
            self._token = secrets.token_bytes(_NONCE_BYTES)

        def authenticate(self, outgoing: Any, incoming: Any) -> None:
            """Shakes hands: the loader proves its key first."""
            theirs, own = incoming.read(), secrets.token_bytes(_NONCE_BYTES)
            if len(theirs) != _NONCE_BYTES:
                raise flight.FlightUnauthenticatedError("it isn't a rank that asks")
            nonces = theirs + own
            outgoing.write(own + _proof(self._key, b"loader", nonces))
            if not hmac.compare_digest(incoming.read(), _proof(self._key, b"rank", nonces)):
                raise flight.FlightUnauthenticatedError(WRONG_KEY)
            outgoing.write(self._token)

        def is_valid(self, token: bytes) -> bytes:
            """Checks the token of a call."""
            if not hmac.compare_digest(token, self._token):
                raise flight.FlightUnauthenticatedError("the token isn't this loader's")
            return b"rank"

    class RankSide(flight.ClientAuthHandler):  # type: ignore[name-defined]
        """Checks the loader's proof, and keeps the token."""

        def __init__(self, key: bytes):
            super().__init__()
            self._key = key
            self._token = b""

        def authenticate(self, outgoing: Any, incoming: Any) -> None:
            """Shakes hands."""
            own = secrets.token_bytes(_NONCE_BYTES)
            outgoing.write(own)
            answer = incoming.read()
            nonces = own + answer[:_NONCE_BYTES]
            if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(self._key, b"loader", nonces)):
                raise flight.FlightUnauthenticatedError(WRONG_KEY)
            outgoing.write(_proof(self._key, b"rank", nonces))
            self._token = incoming.read()

        def get_token(self) -> bytes:
            """Returns the token."""
            return self._token

    return LoaderSide, RankSide
