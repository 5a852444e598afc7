"""Breaks a training step down into phases, of all ranks together."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from collective.ops.communication.collective_names import (
    AGREEMENT,
    GRADIENTS,
    KEYS,
    PHASES,
    ROWS,
    is_near,
    split_name,
)
from collective.ops.counting import counted
from collective.plan.formatting import columns, imbalance, in_bytes
from collective.plan.known_runs import MeasuredSteps
from collective.profiling.report.phases import COMPUTED, OUTSIDE, REST, WAITING

# By group, or by the table of an ungrouped lookup, then by table: see `LookupCounts.carried`.
Carried = dict[str, dict[str, list[float]]]
# More exchanges are put together by phase, and more ranks by mean, least and most.
MOST_EXCHANGES = 12
MOST_RANKS = 4
MOST_TABLES = 10


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Keeps what one rank measured of a step.

    Attributes:
        number: of the training run, counted from 1 in this process.
        ms: from the end of the training run before it to its own.
        phases: milliseconds of each phase, collectives by their names; they add up to `ms`.
        collectives: milliseconds by name, in parallel with whatever else ran.
        received: bytes that came out of each collective.
        samples, ids, asked, table_ids, table_distinct: see
            `collective.profiling.lookup_counts.LookupCounts`.
        dynamic_rows: on this rank after the step, by dynamic table.
        table_counts: `TableStatistics.counts` of this rank after the step, by dynamic table.
        table_rates: how much of what is counted came a step, by dynamic table, since the run that
            was counted before.
    """

    number: int
    ms: float
    phases: dict[str, float] = dataclasses.field(default_factory=dict)
    collectives: dict[str, float] = dataclasses.field(default_factory=dict)
    received: dict[str, int] = dataclasses.field(default_factory=dict)
    samples: int | None = None
    ids: int = 0
    asked: dict[str, int] = dataclasses.field(default_factory=dict)
    dynamic_rows: dict[str, int] = dataclasses.field(default_factory=dict)
    table_counts: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    table_rates: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    table_ids: dict[str, int] = dataclasses.field(default_factory=dict)
    table_distinct: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Keeps means over steps, of N ranks.

    Attributes:
        first, last: the steps' numbers.
        steps: how many.
        ms: [N] of a step.
        phases: [N] milliseconds by phase. They add up to `ms`. Phases are 'input', 'lookup',
            'dense', 'optimizer'; a collective's name for its transfer; 'waiting for others' for the
            time in collectives until the last rank came; 'rest of the run' while nothing of the run
            was at work (TensorFlow's own part: feeds, fetches, scheduling); 'between runs' (hooks,
            the script's own Python).
        received: [N] bytes a step by collective, a rank's own share included.
        samples: of all ranks' batches together; None if there was no lookup.
        ids: looked up on all ranks.
        keys_per_owner: [N] by table, the keys that each rank was asked for.
        table_bytes: bytes a step by table and then by phase, the mean over ranks; a rank's own
            share included. Of lookups in functions and loops they aren't known.
        dynamic_rows: [N] by dynamic table, the rows on each rank after the last step.
        table_counts: by dynamic table, `TableStatistics.counts` of all ranks after the last step.
        table_rates: by dynamic table, how much of what is counted comes a step, on all ranks.
        table_ids: by table, the ids of a step that are looked up on all ranks.
        table_distinct: by replicated table, the sum over ranks of a rank's distinct ids of a step;
            without tables of which it isn't known.
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
    table_bytes: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    dynamic_rows: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    table_counts: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    table_rates: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    table_ids: dict[str, float] = dataclasses.field(default_factory=dict)
    table_distinct: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def samples_per_s(self) -> float | None:
        return None if self.samples is None else self.samples / (sum(self.ms) / len(self.ms)) * 1000

    @property
    def distinct_share(self) -> float | None:
        """Returns how many keys were sent for each id that was looked up."""
        if not self.ids or not self.keys_per_owner:
            return None
        return sum(map(sum, self.keys_per_owner.values())) / self.ids

    @property
    def bytes_per_step(self) -> float:
        """Returns the bytes that a rank receives, its own share included: the mean over ranks."""
        return sum(sum(received.values()) for received in self.received) / len(self.received)

    def mean_phases(self) -> dict[str, float]:
        """Returns the mean milliseconds over ranks, all collectives of one phase together."""
        out: dict[str, float] = collections.defaultdict(float)
        for phases in self.phases:
            for name, ms in phases.items():
                phase = split_name(name)[0] if name.startswith("collective.") else name
                out[phase] += ms / len(self.phases)
        return dict(out)

    def to_dict(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "samples_per_s": self.samples_per_s,
            "distinct_share": self.distinct_share,
            "bytes_per_step": self.bytes_per_step,
        }


def combine(
    steps_by_rank: Sequence[Sequence[StepTimes]], carried_by_rank: Sequence[Carried] = ()
) -> Breakdown:
    """Breaks down the steps that every rank measured.

    A collective ends for all at about the same time, so the rank that spent least in it came last:
    the others waited for as long as they spent more. No two ranks' clocks are compared.

    Args:
        steps_by_rank: of each rank the same steps.
        carried_by_rank: of each rank, see `LookupCounts.carried`; () to leave bytes by table out.
    """
    count = len(steps_by_rank[0])
    phases_by_rank = []
    for steps in steps_by_rank:
        phases: dict[str, float] = collections.defaultdict(float)
        for i, step in enumerate(steps):
            for name, ms in step.phases.items():
                took = step.collectives.get(name)
                if took:
                    least = min(other[i].collectives.get(name, took) for other in steps_by_rank)
                    phases[WAITING] += ms * (1 - least / took) / count
                    ms *= least / took
                phases[name] += ms / count
        phases_by_rank.append(dict(phases))
    keys_per_owner: dict[str, list[float]] = {}
    for table in sorted({table for steps in steps_by_rank for s in steps for table in s.asked}):
        keys_per_owner[table] = [
            sum(step.asked.get(table, 0) for step in steps) / count for steps in steps_by_rank
        ]
    samples = [step.samples for steps in steps_by_rank for step in steps]
    received = [_mean([step.received for step in steps]) for steps in steps_by_rank]
    return Breakdown(
        first=steps_by_rank[0][0].number,
        last=steps_by_rank[0][-1].number,
        steps=count,
        ms=[sum(step.ms for step in steps) / count for steps in steps_by_rank],
        phases=phases_by_rank,
        received=received,
        samples=None if None in samples else sum(n or 0 for n in samples) / count,
        ids=sum(step.ids for steps in steps_by_rank for step in steps) / count,
        keys_per_owner=keys_per_owner,
        table_bytes=bytes_by_table(received, carried_by_rank),
        dynamic_rows={
            table: [steps[-1].dynamic_rows.get(table, 0) for steps in steps_by_rank]
            for table in sorted({t for steps in steps_by_rank for t in steps[-1].dynamic_rows})
        },
        table_counts=_of_tables([[steps[-1].table_counts] for steps in steps_by_rank]),
        table_rates=_of_tables([[s.table_rates for s in steps] for steps in steps_by_rank]),
        table_ids=_sums([[step.table_ids for step in steps] for steps in steps_by_rank]),
        table_distinct=_sums([[step.table_distinct for step in steps] for steps in steps_by_rank]),
    )


def measured_steps(breakdown: Breakdown) -> MeasuredSteps:
    """Returns what the plan of a graph keeps of a profile."""
    asked = {table: sum(keys) for table, keys in breakdown.keys_per_owner.items()}
    return MeasuredSteps(
        breakdown.first,
        breakdown.last,
        sum(breakdown.ms) / len(breakdown.ms),
        breakdown.samples,
        breakdown.table_ids,
        {**asked, **breakdown.table_distinct},
        {table: sum(rows) for table, rows in breakdown.dynamic_rows.items()},
    )


def _sums(by_rank_and_step: Sequence[Sequence[Mapping[str, int]]]) -> dict[str, float]:
    """Returns sums over ranks of means over steps."""
    sums: dict[str, float] = collections.defaultdict(float)
    for of_steps in by_rank_and_step:
        for name, mean in _mean(of_steps).items():
            sums[name] += mean
    return dict(sorted(sums.items()))


def _of_tables(
    by_rank_and_step: Sequence[Sequence[Mapping[str, Mapping[str, float]]]],
) -> dict[str, dict[str, float]]:
    """Returns sums over ranks of means over steps, by table and name.

    Args:
        by_rank_and_step: of each rank and step, by table and name; steps that lack a table are left
            out of its means.
    """
    sums: dict[str, dict[str, float]] = {}
    for of_steps in by_rank_and_step:
        for table in {table for of_step in of_steps for table in of_step}:
            of_table, counted_steps = (
                sums.setdefault(table, {}),
                [s for s in of_steps if table in s],
            )
            for of_step in counted_steps:
                for name, count in of_step[table].items():
                    of_table[name] = of_table.get(name, 0) + count / len(counted_steps)
    return dict(sorted(sums.items()))


def bytes_by_table(
    received_by_rank: Sequence[Mapping[str, float]], carried_by_rank: Sequence[Carried]
) -> dict[str, dict[str, float]]:
    """Divides the bytes of exchanges among tables, by the keys and rows that they carry.

    An exchange of keys also has headers, which are divided like the keys. Rows and gradients of all
    tables of an exchange are sent in one type, so the bytes of each table are exact.

    Args:
        received_by_rank: of each rank, bytes by the names of collectives.
        carried_by_rank: of each rank, see `LookupCounts.carried`.

    Returns:
        By table and then by phase, the mean over ranks.
    """
    carried: dict[str, dict[str, list[float]]] = {}
    for of_rank in carried_by_rank:
        for subject, counts_by_table in of_rank.items():
            sums = carried.setdefault(subject, {})
            for table, (keys, elements) in counts_by_table.items():
                before = sums.get(table, [0.0, 0.0])
                sums[table] = [before[0] + keys, before[1] + elements]
    out: dict[str, dict[str, float]] = {}
    for received in received_by_rank:
        for name, size in received.items():
            phase, subject = split_name(name)
            if phase not in (KEYS, ROWS, GRADIENTS) or subject not in carried:
                continue
            place = 0 if phase == KEYS else 1
            weights = {table: counts[place] for table, counts in carried[subject].items()}
            total = sum(weights.values())
            for table, weight in weights.items():
                share = weight / total if total > 0 else 1 / len(weights)
                of_table = out.setdefault(table, {})
                of_table[phase] = of_table.get(phase, 0.0) + size * share / len(received_by_rank)
    return out


def _mean(counts: Sequence[Mapping[str, int]]) -> dict[str, float]:
    total: dict[str, float] = collections.defaultdict(float)
    for count in counts:
        for name, value in count.items():
            total[name] += value
    return {name: value / len(counts) for name, value in total.items()}


# ---- Text


def text(breakdown: Breakdown, ranks: Sequence[int]) -> str:
    """Returns the table that rank 0 prints, of the measurements of `ranks`."""
    rows, received = _rows(breakdown)
    head = [f"rank {r}" for r in ranks] if len(ranks) <= MOST_RANKS else ["mean", "least", "most"]
    table = []
    for name in _order(rows):
        cells = _cells([row.get(name, 0.0) for row in rows])
        table.append([name, *cells, in_bytes(received[name]) if name in received else ""])
    total = breakdown.bytes_per_step
    table.append(["step", *_cells(breakdown.ms), in_bytes(total) if total else ""])
    steps = f"step {breakdown.first}"
    if breakdown.steps > 1:
        steps = f"steps {breakdown.first} to {breakdown.last}"
    lines = [
        f"collective: {steps}, milliseconds a step and bytes that a rank receives",
        *columns(["", *head, "received"], table),
    ]
    rates = []
    if breakdown.samples_per_s is not None:
        rates.append(f"{breakdown.samples_per_s:,.0f} samples/s")
    if breakdown.distinct_share is not None:
        rates.append(f"{breakdown.distinct_share:.1%} of the ids looked up were sent as keys")
    keys_by_owner = [sum(keys) for keys in zip(*breakdown.keys_per_owner.values())]
    if len(keys_by_owner) > 1 and sum(keys_by_owner):
        rates.append(f"keys per owner max/mean {imbalance(keys_by_owner):.2f}")
    if rates:
        lines.append("; ".join(rates))
    return "\n".join([*lines, *_table_lines(breakdown)])


def _table_lines(breakdown: Breakdown) -> list[str]:
    """Returns lines of text about the keys that the largest dynamic tables gained and lost."""
    by_bytes = sorted(breakdown.table_counts.items(), key=lambda item: -item[1].get("bytes", 0))
    lines = []
    for table, counts in by_bytes[:MOST_TABLES]:
        rates = breakdown.table_rates.get(table, {})
        words = [f"table '{table}': {counts['rows']:,.0f} rows, {in_bytes(counts['bytes'])}"]
        for name, count in counts.items():
            if name in ("rows", "bytes") or not count:
                continue
            rate = f" ({rates[name]:,.1f} a step)" if name in rates else ""
            words.append(f"{count:,.0f} {name}{rate}")
        lines.append(", ".join(words))
    if len(by_bytes) > MOST_TABLES:
        lines.append(f"and {counted(len(by_bytes) - MOST_TABLES, 'smaller dynamic table')}")
    return lines


def _rows(breakdown: Breakdown) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Combines many exchanges by phase.

    Returns:
        (for each rank the milliseconds by label, mean bytes over ranks by label).
    """
    labels = {name: name for phases in breakdown.phases for name in phases}
    names = [name for name in labels if name.startswith("collective.")]
    for name in names:
        phase, of = split_name(name)
        number = sum(split_name(other)[0] == phase for other in names)
        if len(names) > MOST_EXCHANGES and number > 1:
            labels[name] = f"{phase} of {number} exchanges"
        elif phase in PHASES[:-1]:
            labels[name] = f"{phase} {of}".rstrip() + " within host" * is_near(name)
    rows = []
    for phases in breakdown.phases:
        row: dict[str, float] = collections.defaultdict(float)
        for name, ms in phases.items():
            row[labels[name]] += ms
        rows.append(dict(row))
    received: dict[str, float] = collections.defaultdict(float)
    for received_bytes in breakdown.received:
        for name, size in received_bytes.items():
            received[labels.get(name, name)] += size / len(breakdown.received)
    return rows, dict(received)


def _order(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Returns the labels in the order of a step; unknown labels are exchanges."""
    begin, end = [OUTSIDE, COMPUTED[0], AGREEMENT], [*COMPUTED[1:], WAITING, REST]
    labels = {label for row in rows for label in row}

    def place(label: str) -> int:
        return next((i for i, phase in enumerate(PHASES) if label.startswith(phase)), len(PHASES))

    exchanges = sorted(labels - {*begin, *end}, key=lambda label: (place(label), label))
    return [label for label in [*begin, *exchanges, *end] if label in labels]


def _cells(values: Sequence[float]) -> list[str]:
    if len(values) > MOST_RANKS:
        values = [sum(values) / len(values), min(values), max(values)]
    return [f"{value:.2f}" for value in values]
