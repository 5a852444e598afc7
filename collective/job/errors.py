"""The error that ends the launcher before anything has started."""

from __future__ import annotations


class UsageError(Exception):
    """Says in one sentence what was asked for and can't be had; the exit code is then 2."""
