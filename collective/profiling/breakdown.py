"""The split of a step over its phases, of all ranks together."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from collective.ops.collective_names import AGREEMENT, PHASES, split_name
from collective.plan.formatting import columns, imbalance, in_bytes
from collective.profiling.phases import COMPUTED

OUTSIDE, REST, WAITING = "between runs", "rest of the run", "waiting for others"
MOST_EXCHANGES = 12  # that are shown one by one
MOST_RANKS = 4


@dataclasses.dataclass(frozen=True)
class Step:
    """A step as one rank measured it.

    Attributes:
        number: of the training run, counted from 1 in this process.
        ms: from the end of the training run before it to its own.
        phases: milliseconds of each phase, collectives by their names; they add up to `ms`.
        collectives: by name, the milliseconds that it took beside whatever else ran.
        received: bytes that came out of each collective.
        samples, ids, asked: see `collective.profiling.lookup_counts.Counts`.
    """

    number: int
    ms: float
    phases: dict[str, float] = dataclasses.field(default_factory=dict)
    collectives: dict[str, float] = dataclasses.field(default_factory=dict)
    received: dict[str, int] = dataclasses.field(default_factory=dict)
    samples: int | None = None
    ids: int = 0
    asked: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Split:
    """Means over steps. N ranks.

    Attributes:
        first, last: the steps' numbers.
        steps: how many.
        ms: [N] of a step.
        phases: [N] milliseconds by phase: 'input', 'lookup', 'dense', 'optimizer', a collective's
            name for its transfer, 'waiting for others' for what ranks waited in collectives for
            those that came later, 'rest of the run' while nothing of the run was at work
            (TensorFlow's own part: feeds, fetches, scheduling), 'between runs' (hooks, the script's
            own Python). They add up to `ms`.
        received: [N] bytes a step by collective, a rank's own share included.
        samples: of all ranks' batches together; None if there was no lookup.
        ids: looked up on all ranks.
        keys_per_owner: [N] by table, the keys that each rank was asked for.
    """

    first: int
    last: int
    steps: int
    ms: list[float]
    phases: list[dict[str, float]]
    received: list[dict[str, float]]
    samples: float | None
    ids: float
    keys_per_owner: dict[str, list[float]]

    @property
    def samples_per_s(self) -> float | None:
        return None if self.samples is None else self.samples / (sum(self.ms) / len(self.ms)) * 1000

    @property
    def distinct_share(self) -> float | None:
        """Keys that travelled for each id that was looked up."""
        return (
            sum(map(sum, self.keys_per_owner.values())) / self.ids
            if self.ids and self.keys_per_owner
            else None
        )

    @property
    def bytes_per_step(self) -> float:
        """That a rank receives, its own share included: the mean over ranks."""
        return sum(sum(of.values()) for of in self.received) / len(self.received)

    def mean_phases(self) -> dict[str, float]:
        """Milliseconds, the mean over ranks, all collectives of one phase together."""
        out: dict[str, float] = collections.defaultdict(float)
        for of in self.phases:
            for name, ms in of.items():
                out[split_name(name)[0] if name.startswith("collective.") else name] += ms / len(
                    self.phases
                )
        return dict(out)

    def to_dict(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "samples_per_s": self.samples_per_s,
            "distinct_share": self.distinct_share,
            "bytes_per_step": self.bytes_per_step,
        }


def join(told: Sequence[Sequence[Step]]) -> Split:
    """The split of the steps that every rank measured.

    A collective ends for all at about the same time, so the rank that spent least in it came last:
    what the others spent more, they waited. No two ranks' clocks are compared.
    """
    count = len(told[0])
    phases = []
    for steps in told:
        mine: dict[str, float] = collections.defaultdict(float)
        for i, step in enumerate(steps):
            for name, ms in step.phases.items():
                took = step.collectives.get(name)
                if took:
                    least = min(other[i].collectives.get(name, took) for other in told)
                    mine[WAITING] += ms * (1 - least / took) / count
                    ms *= least / took
                mine[name] += ms / count
        phases.append(dict(mine))
    tables = sorted({table for steps in told for step in steps for table in step.asked})
    batches = [step.samples for steps in told for step in steps]
    return Split(
        first=told[0][0].number,
        last=told[0][-1].number,
        steps=count,
        phases=phases,
        ms=[sum(step.ms for step in steps) / count for steps in told],
        received=[_mean([step.received for step in steps]) for steps in told],
        samples=None if None in batches else sum(b or 0 for b in batches) / count,
        ids=sum(step.ids for steps in told for step in steps) / count,
        keys_per_owner={
            t: [sum(step.asked.get(t, 0) for step in steps) / count for steps in told]
            for t in tables
        },
    )


def _mean(of: Sequence[Mapping[str, int]]) -> dict[str, float]:
    total: dict[str, float] = collections.defaultdict(float)
    for one in of:
        for name, value in one.items():
            total[name] += value
    return {name: value / len(of) for name, value in total.items()}


def text(split: Split, ranks: Sequence[int]) -> str:
    """The table that rank 0 prints; `ranks` are those whose measurements it is made of."""
    rows, received = _rows(split)
    head = [f"rank {r}" for r in ranks] if len(ranks) <= MOST_RANKS else ["mean", "least", "most"]
    cells = [
        [
            name,
            *_cells([of.get(name, 0.0) for of in rows]),
            in_bytes(received[name]) if name in received else "",
        ]
        for name in _order(rows)
    ]
    cells.append(
        ["step", *_cells(split.ms), in_bytes(split.bytes_per_step) if split.bytes_per_step else ""]
    )
    steps = f"steps {split.first} to {split.last}" if split.steps > 1 else f"step {split.first}"
    lines = [
        f"collective: {steps}, milliseconds a step and bytes that a rank receives",
        *columns(["", *head, "received"], cells),
    ]
    said = [f"{split.samples_per_s:,.0f} samples/s"] if split.samples_per_s is not None else []
    said += (
        [f"{split.distinct_share:.1%} of the ids looked up travelled as keys"]
        if split.distinct_share is not None
        else []
    )
    owners = [sum(asked) for asked in zip(*split.keys_per_owner.values())]
    said += (
        [f"keys per owner max/mean {imbalance(owners):.2f}"]
        if len(owners) > 1 and sum(owners)
        else []
    )
    return "\n".join(lines + ["; ".join(said)] * bool(said))


def _rows(split: Split) -> tuple[list[dict[str, float]], dict[str, float]]:
    """(milliseconds by row of the table, bytes by row, the mean over ranks), many exchanges put
    together by phase.
    """
    names = {name for of in split.phases for name in of if name.startswith("collective.")}
    labels = {name: name for of in split.phases for name in of}
    for name in names:
        phase, of = split_name(name)
        number = sum(split_name(other)[0] == phase for other in names)
        labels[name] = (
            f"{phase} of {number} exchanges"
            if len(names) > MOST_EXCHANGES and number > 1
            else f"{phase} {of}".rstrip()
            if phase in PHASES[:-1]
            else name
        )
    rows = []
    received: dict[str, float] = collections.defaultdict(float)
    for phases, got in zip(split.phases, split.received):
        row: dict[str, float] = collections.defaultdict(float)
        for name, ms in phases.items():
            row[labels[name]] += ms
        for name, size in got.items():
            received[labels.get(name, name)] += size / len(split.received)
        rows.append(dict(row))
    return rows, dict(received)


def _order(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """As a step goes; what isn't known by name are exchanges."""
    begin, end = [OUTSIDE, COMPUTED[0], AGREEMENT], [*COMPUTED[1:], WAITING, REST]
    names = {name for row in rows for name in row}

    def place(name: str) -> int:
        return next((i for i, phase in enumerate(PHASES) if name.startswith(phase)), len(PHASES))

    exchanges = sorted(names - {*begin, *end}, key=lambda name: (place(name), name))
    return [name for name in [*begin, *exchanges, *end] if name in names]


def _cells(values: Sequence[float]) -> list[str]:
    shown = (
        values
        if len(values) <= MOST_RANKS
        else [sum(values) / len(values), min(values), max(values)]
    )
    return [f"{value:.2f}" for value in shown]
