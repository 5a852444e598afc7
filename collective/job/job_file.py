"""Hands a job file's values to the ranks: `collective launch job.yaml`.

The launcher acts on some keys itself. Others are arguments that a script leaves out, which only a
Trainer looks up. If a script trains without one, rank 0 says once which keys have no effect.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

VARIABLE = "COLLECTIVE_JOB_FILE"  # JSON: the resolved job
# Keys that a Trainer follows, or keys of theirs.
OF_TRAINERS = ("seed", "max_length", "records_per_epoch", "checkpoints", "metrics", "searcher")
_OF_LAUNCHER = "metrics.port"  # which such a section has, too
_OF_SEARCH = ("name", "max_trials", "max_concurrent_trials", "parameters")

_followed = threading.Event()


def read(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the resolved job file; {} if the job has none.

    Raises:
        ValueError: the variable isn't what the launcher has put there.
    """
    text = environment.get(VARIABLE, "")
    if not text:
        return {}
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{VARIABLE} in the environment isn't JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{VARIABLE} in the environment is {text!r}; it is an object.")
    return values


def searched(job: Mapping[str, Any]) -> list[str]:
    """Returns the names of the hyperparameters that a search chooses for this job."""
    return list(job.get("searcher", {}).get("parameters", ()))


def follow() -> None:
    """Notes that a Trainer follows the file."""
    _followed.set()


def keys_of_trainers(job: Mapping[str, Any]) -> list[str]:
    """Returns the keys of a job file that only a Trainer follows."""
    found = [key for name in OF_TRAINERS for key in _leaves(job, name)]
    others = {_OF_LAUNCHER, *(f"searcher.{name}" for name in _OF_SEARCH)}
    return [key for key in found if key not in others]


def _leaves(job: Mapping[str, Any], name: str) -> Iterator[str]:
    value = job.get(name)
    if name in ("checkpoints", "metrics", "searcher") and isinstance(value, Mapping):
        yield from (f"{name}.{key}" for key in value)
    elif value is not None:
        yield name


def warn_unless_followed(environment: Mapping[str, str] | None = None) -> None:
    """Warns of keys without effect, if no Trainer follows them; called when training begins."""
    keys = [] if _followed.is_set() else keys_of_trainers(read(environment or os.environ))
    if keys:
        warnings.warn(
            f"of the job file, {', '.join(keys)}: only collective.Trainer follows them, and this "
            "script trains without one. They have no effect, unless the script reads "
            "collective.job_info().config.",
            stacklevel=2,
        )
