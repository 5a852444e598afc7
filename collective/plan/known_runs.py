"""Records what is known of a graph's training runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from collective.coordination.run_analysis import RunFootprint


@dataclasses.dataclass(frozen=True)
class MeasuredSteps:
    """Holds what a profile has measured, the mean of some steps of N ranks.

    Attributes:
        first, last: the numbers of the steps.
        ms: of a step, the mean over ranks.
        samples: of all ranks' batches together; None if there was no lookup.
        ids: ids of a step that all ranks look up, by the names of the tables.
        distinct: the sum over ranks of a rank's distinct ids of a step, by the names of the tables;
            without those of which it isn't known.
        rows: rows of dynamic tables on all ranks, by their names.
    """

    first: int
    last: int
    ms: float
    samples: float | None
    ids: Mapping[str, float]
    distinct: Mapping[str, float]
    rows: Mapping[str, int]


@dataclasses.dataclass
class KnownRuns:
    """Records what is known of a graph's runs.

    Attributes:
        training: the footprint of the first training run, once there was one.
        received_bytes: bytes per step by the names of the collectives, from the last profile, on
            this rank.
        keys_per_owner: keys per step that each rank was asked for, by the names of the tables, from
            the last profile.
        measured: what the last profile has measured; None without one.
    """

    training: RunFootprint | None = None
    received_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    keys_per_owner: Mapping[str, list[float]] = dataclasses.field(default_factory=dict)
    measured: MeasuredSteps | None = None
