"""Checks variables that ranks inherit from the launcher, and would die of without naming them."""

from __future__ import annotations

from collections.abc import Mapping

from collective.job import training_apart
from collective.job.errors import UsageError

# Whole numbers, and the least that each may be.
_NUMBERS = {"HOROVOD_GLOO_TIMEOUT_SECONDS": 1, "TF_NUM_INTRAOP_THREADS": 0}


def check_inherited(environment: Mapping[str, str]) -> None:
    """Checks the variables of the user whose values no rank would name in an error.

    Raises:
        UsageError: one has a value that it can't have.
    """
    try:
        training_apart.is_independent(environment)
    except ValueError as error:
        raise UsageError(str(error)) from None
    for name, least in _NUMBERS.items():
        text = environment.get(name, "")
        if text and not (text.isascii() and text.isdecimal() and int(text) >= least):
            raise UsageError(f"{name}={text}: give a whole number, {least} or more, or unset it")
