"""The error of somebody who asked for what can't be."""

from __future__ import annotations


class UsageError(Exception):
    """Bad usage, told in one sentence; the launcher then ends with exit code 2."""
