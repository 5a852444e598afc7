"""Saves what all ranks know together as one entry of a checkpoint."""

from __future__ import annotations

from typing import Any

from collective.checkpoint.saving.saver import unsharded_variables
from collective.tensorflow_internals.checkpoints import saveable_object


class GatheredState(saveable_object.SaveableObject):
    """Combines the contributions of all ranks; rank 0 saves it, and each rank restores it.

    With one rank a Saver saves it like anything else, and nothing is gathered.
    """

    def contribution(self) -> Any:
        """Returns this rank's contribution, which JSON must be able to hold."""
        raise NotImplementedError

    def gather(self, contributions: list[Any]) -> None:
        """Takes the ranks' contributions, in order, which are saved next."""
        raise NotImplementedError

    def restart(self) -> None:
        """Starts again if a restored checkpoint has no such state."""
        raise NotImplementedError


def gathered_states(saver: Any) -> dict[str, GatheredState]:
    """Returns a Saver's gathered states, by name; the same on all ranks."""
    variables = unsharded_variables(saver)
    return {name: v for name, v in sorted(variables.items()) if isinstance(v, GatheredState)}
