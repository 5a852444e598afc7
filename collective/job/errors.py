"""The error that ends the launcher before anything has started."""

from __future__ import annotations


class UsageError(Exception):
    """Says in one sentence why a request isn't possible; the exit code is then 2."""
