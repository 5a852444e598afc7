"""Determines which stream has which global batch: the streams take turns until they end.

    stream 0    0  3  6  8  9       of five batches
    stream 1    1  4                of two
    stream 2    2  5  7             of three

It depends on the lengths alone, so that any rank, at any number of ranks, finds a global batch
again.
"""

from __future__ import annotations

from collections.abc import Mapping


def place_of(number: int, streams: int, lengths: Mapping[int, int]) -> tuple[int, int] | None:
    """Returns the stream of a global batch and its number there; None if it is beyond the end.

    Args:
        number: of the global batch.
        streams: how many there are.
        lengths: how many batches streams have, by stream; those left out don't end.
    """
    begin, left = 0, number
    for end in [*sorted(set(lengths.values())), None]:
        turn = [s for s in range(streams) if s not in lengths or lengths[s] > begin]
        if not turn:
            return None
        if end is None or left < (end - begin) * len(turn):
            rounds, position = divmod(left, len(turn))
            return turn[position], begin + rounds
        left -= (end - begin) * len(turn)
        begin = end
    return None


def used_before(place: tuple[int, int], streams: int, lengths: Mapping[int, int]) -> dict[int, int]:
    """Returns how many batches of each stream come before a place."""
    stream, number = place
    return {s: min(number + (s < stream), lengths.get(s, number + 1)) for s in range(streams)}
