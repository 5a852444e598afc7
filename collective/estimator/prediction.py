"""Predictions of all ranks on rank 0, in the order of the input."""

from __future__ import annotations

import base64
import itertools
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, Any

from collective.coordination import barrier
from collective.ops import collectives

MESSAGE = 1 << 20  # bytes of predictions that a rank sends at once, if a batch isn't larger


def gather(batches: Iterable[Any]) -> Iterator[Any]:
    """All ranks' batches on rank 0, nothing on the others. Every rank must call it.

    It returns when rank 0 has them all: in a temporary file (in TMPDIR), which lives as long as the
        iterator. So nobody
    waits for the one who reads them, however slowly he does or how soon he stops. A rank holds a
    few batches in memory.

    Args:
        batches: this rank's. They come out in turn: the first of each rank, in the order of the
            ranks, then the second….
    """
    spool = Spool()
    for batch in batches:
        spool.add(pickle.dumps(batch, protocol=4))
    told = barrier.exchange(
        None, "gathering predictions", {"count": spool.count, "bytes": spool.total}
    )
    counts = [text["count"] for text in told]
    largest = max((text["bytes"] / text["count"] for text in told if text["count"]), default=0)
    at_once = max(1, int(MESSAGE // max(1, largest)))
    own, everyones = iter(spool), Spool()
    for _ in range(0, max(counts), at_once):
        mine = list(itertools.islice(own, at_once))
        sent = (
            [] if collectives.rank() == 0 else [base64.b64encode(piece).decode() for piece in mine]
        )
        told = barrier.exchange(None, "gathering predictions", {"batches": sent})
        if collectives.rank() == 0:
            theirs = [mine] + [
                [base64.b64decode(piece) for piece in text["batches"]] for text in told[1:]
            ]
            for k in range(at_once):
                for pieces in theirs:
                    if k < len(pieces):
                        everyones.add(pieces[k])
    return (pickle.loads(piece) for piece in everyones)


class Spool:
    """Pieces of bytes in a temporary file: first all are added, then they are read once, in that
    order.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="collective-predictions-")
        self._sizes: list[int] = []

    @property
    def count(self) -> int:
        return len(self._sizes)

    @property
    def total(self) -> int:
        """Bytes of all pieces."""
        return sum(self._sizes)

    def add(self, piece: bytes) -> None:
        self._file.write(piece)
        self._sizes.append(len(piece))

    def __iter__(self) -> Iterator[bytes]:
        with self._file:
            self._file.seek(0)
            for size in self._sizes:
                yield self._file.read(size)
