"""Fills in arguments that a Trainer's script leaves out: those of `collective launch job.yaml`.

A value is given in one place. If the script and the job file give different ones, that is an error:
either could be ignored only silently, and `--set` must have an effect.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from collective.job import job_file
from collective.job.info import JobInfo
from collective.trainer.schedule import Batch, Epoch, Record, Seconds, Unit

_UNITS: dict[str, type[Unit]] = {
    "batches": Batch,
    "records": Record,
    "epochs": Epoch,
    "seconds": Seconds,
}
# The keys of the job file that are arguments of fit().
_OF_FIT = {
    "max_length": "max_length",
    "checkpoint_period": "checkpoints.period",
    "validation_period": "metrics.validation_period",
    "reporting_period": "metrics.reporting_period",
    "checkpoint_policy": "checkpoints.policy",
    "latest_checkpoint": "checkpoints.start",
    "continue_id": "checkpoints.continue_id",
    "step_zero_validation": "metrics.step_zero_validation",
}


class JobArguments:
    """Looks arguments up in the job file.

    Args:
        job: the job; without a job file every argument is the script's.
    """

    def __init__(self, job: JobInfo):
        self._job = job

    def argument(self, name: str, given: Any, place: str) -> Any:
        """Returns the value of an argument; None if neither the script nor the file has one.

        Args:
            name: the argument's, for messages: `fit(max_length)`.
            given: the script's value; None if it leaves the argument out.
            place: the key of the job file, with dots.

        Raises:
            ValueError: both have a value, and these differ.
        """
        found = self._found(place)
        if given is None or found is None or given == found:
            return found if given is None else given
        raise self._contradiction(name, given, place)

    def _contradiction(self, name: str, given: Any, place: str) -> ValueError:
        return ValueError(
            f"{name}={given!r}, but the job file has {place}: {self._plain(place)!r}. Leave the "
            "argument out of the script, which the job file then decides, or the key out of the "
            "file."
        )

    def of_fit(self, name: str, given: Any, usual: Any = None) -> Any:
        """Returns the value of an argument of fit(), as `argument` does.

        Args:
            name: the argument's.
            given: the script's value.
            usual: its default, which counts as left out; None is a value then.

        Raises:
            ValueError: as for `argument`.
        """
        label, place = f"fit({name})", _OF_FIT[name]
        is_left_out = given is usual or given == usual
        if given is None and not is_left_out and self._found(place) is not None:
            raise self._contradiction(label, given, place)
        found = self.argument(label, None if is_left_out else given, place)
        return given if found is None else found

    def folder(self, given: str | None) -> str | None:
        """Returns the folder of checkpoints; each trial of a search has its own in it.

        Raises:
            ValueError: as for `argument`; or a trial has no id to name its folder by.
        """
        folder = self.argument("Trainer(model_dir)", given, "checkpoints.folder")
        if not job_file.searched(self._job.config) or folder is None:
            return folder
        if self._job.job_id is None:
            raise ValueError(
                f"this is a trial of a search, whose checkpoints need a folder of their own in "
                f"'{folder}', but COLLECTIVE_JOB_ID, the folder's name, isn't set."
            )
        return os.path.join(folder, self._job.job_id)

    def params(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the hyperparameters: the script's, or else the job's.

        Raises:
            ValueError: both have one, and it differs.
        """
        if given is None:
            return dict(self._job.hyperparameters)
        if self._job.config:
            for name, value in self._job.hyperparameters.items():
                if name in given and not _are_equal(given[name], value):
                    raise ValueError(
                        f"Trainer(params) has {name}={given[name]!r}, but the job file has "
                        f"hyperparameters.{name}: {value!r}. Take it from collective.job_info()."
                        "hyperparameters, or leave it out of one."
                    )
        return dict(given)

    def _found(self, place: str) -> Any:
        value = self._plain(place)
        if isinstance(value, Mapping):
            [(unit, amount)] = value.items()
            return _UNITS[unit](amount)
        return value

    def _plain(self, place: str) -> Any:
        value: Any = self._job.config
        for key in place.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


def _are_equal(given: Any, value: Any) -> bool:
    """Compares a value with one that was JSON, which has no tuples."""
    return bool((list(given) if isinstance(given, tuple) else given) == value)
