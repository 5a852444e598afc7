"""Gathers the predictions of all ranks on rank 0, in the order of the input."""

from __future__ import annotations

import base64
import itertools
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, Any

from collective.coordination import barrier
from collective.ops.communication import collectives

# A rank sends predictions of about this many bytes at once, unless a batch is larger.
MESSAGE_BYTES = 1 << 20


def gather(batches: Iterable[Any]) -> Iterator[Any]:
    """Returns all ranks' batches on rank 0, and nothing on the others. Every rank must call it.

    It returns when rank 0 has them all, in a temporary file (in TMPDIR), which lives as long as the
    iterator. So no rank waits for a reader of them, however slowly or how little of them. A rank
    holds a few batches in memory.

    Args:
        batches: this rank's. They come out in turn: the first of each rank, in the order of the
            ranks, then the second….
    """
    spool = Spool()
    for batch in batches:
        spool.add(pickle.dumps(batch, protocol=4))
    size = {"count": spool.count, "bytes": spool.total}
    sizes = barrier.exchange(None, "gathering predictions", size)
    mean_sizes = [size["bytes"] / size["count"] for size in sizes if size["count"]]
    pieces_at_once = max(1, int(MESSAGE_BYTES // max(1, max(mean_sizes, default=0))))
    is_first, pieces, gathered = collectives.rank() == 0, iter(spool), Spool()
    for _ in range(0, max(size["count"] for size in sizes), pieces_at_once):
        next_pieces = list(itertools.islice(pieces, pieces_at_once))
        sent = [] if is_first else [base64.b64encode(piece).decode() for piece in next_pieces]
        messages = barrier.exchange(None, "gathering predictions", {"batches": sent})
        if is_first:
            pieces_by_rank = [next_pieces]
            for message in messages[1:]:
                pieces_by_rank.append([base64.b64decode(piece) for piece in message["batches"]])
            for in_turn in itertools.zip_longest(*pieces_by_rank):
                for piece in in_turn:
                    if piece is not None:
                        gathered.add(piece)
    return (pickle.loads(piece) for piece in gathered)


class Spool:
    """Keeps pieces of bytes in a temporary file: all are added, then read once, in that order."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="collective-predictions-")
        self._sizes: list[int] = []

    @property
    def count(self) -> int:
        return len(self._sizes)

    @property
    def total(self) -> int:
        """Returns the bytes of all pieces."""
        return sum(self._sizes)

    def add(self, piece: bytes) -> None:
        self._file.write(piece)
        self._sizes.append(len(piece))

    def __iter__(self) -> Iterator[bytes]:
        with self._file:
            self._file.seek(0)
            for size in self._sizes:
                yield self._file.read(size)
