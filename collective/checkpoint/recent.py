"""Which checkpoint this process saved or restored last."""

from __future__ import annotations

_last: list[str] = []


def note(prefix: str) -> None:
    _last[:] = [prefix]


def last() -> str | None:
    """Its prefix; None if there was none yet."""
    return _last[0] if _last else None
