"""Saves what all ranks together know as one entry of a checkpoint."""

from __future__ import annotations

from typing import Any

from collective.checkpoint.saving.saver import unsharded_variables
from collective.tensorflow_internals.checkpoints import saveable_object


class GatheredState(saveable_object.SaveableObject):
    """Is saved by rank 0, and restored by each rank, from what every rank contributes.

    With one rank a Saver saves it as anything else, and nothing is gathered.
    """

    def contribution(self) -> Any:
        """Returns what this rank contributes; what JSON can hold."""
        raise NotImplementedError

    def gather(self, contributions: list[Any]) -> None:
        """Takes what the ranks contribute, in their order, to be saved next."""
        raise NotImplementedError

    def restart(self) -> None:
        """Starts again if a restored checkpoint has no such state."""
        raise NotImplementedError


def gathered_states(saver: Any) -> dict[str, GatheredState]:
    """Returns a Saver's states that are gathered, by their names; the same on all ranks."""
    variables = unsharded_variables(saver)
    return {name: v for name, v in sorted(variables.items()) if isinstance(v, GatheredState)}
