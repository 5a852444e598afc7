"""Names the phases of a training step, in order, and says what each is."""

from __future__ import annotations

from collections.abc import Mapping

from collective.ops.communication import collective_names
from collective.ops.communication.collective_names import (
    AGREEMENT,
    GRADIENTS,
    KEYS,
    OTHER,
    ROWS,
    split_name,
)

INPUT, LOOKUP, DENSE, OPTIMIZER = "input", "lookup", "dense", "optimizer"
COMPUTED = (INPUT, LOOKUP, DENSE, OPTIMIZER)  # in the order of a step
OUTSIDE, REST, WAITING = "between runs", "rest of the run", "waiting for others"

MEANINGS = {
    OUTSIDE: "hooks, and the script's own Python between two steps",
    INPUT: "reading and parsing a batch, and all that makes ids of it",
    AGREEMENT: "the ranks tell each other that they are ready for the step",
    KEYS: "ids travel to the ranks that own their rows",
    ROWS: "rows travel back",
    GRADIENTS: "gradients of rows travel to the owners",
    collective_names.DENSE: "the mean of the dense gradients over all ranks",
    OTHER: "metrics, and what the script exchanges itself",
    LOOKUP: "this rank's part of lookups: distinct ids, reading rows, pooling, and their gradients",
    DENSE: "the rest of the model, forward and backward",
    OPTIMIZER: "updates of variables and of the rows of tables",
    WAITING: "in an exchange before the last rank has come to it",
    REST: "nothing of the step is at work: TensorFlow's own part, such as feeds and fetches",
}
ORDER = tuple(MEANINGS)
EXCHANGES = (AGREEMENT, KEYS, ROWS, GRADIENTS, collective_names.DENSE, OTHER)


def phase_of(name: str) -> str:
    """Returns the phase of `name`, a phase or a collective; OTHER if it is unknown."""
    if name in MEANINGS:
        return name
    return split_name(name)[0]


def by_phase(values: Mapping[str, float]) -> dict[str, float]:
    """Adds up milliseconds or bytes by phase, in the order of a step; absent phases are left out.

    Args:
        values: by phases and by the names of collectives.
    """
    sums: dict[str, float] = {}
    for name, value in values.items():
        phase = phase_of(name)
        sums[phase] = sums.get(phase, 0.0) + value
    return {phase: sums[phase] for phase in ORDER if phase in sums}
