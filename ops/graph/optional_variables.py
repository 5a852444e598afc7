"""Marks variables that a checkpoint may lack: they start fresh where it does."""

from __future__ import annotations

from typing import Any


def let_be_missing(variable: Any) -> None:
    """Lets `variable` start fresh if a restored checkpoint lacks it."""
    variable._collective_may_be_missing = True


def may_be_missing(variable: Any) -> bool:
    """Tells whether a restored checkpoint may lack `variable`."""
    return getattr(variable, "_collective_may_be_missing", False)
