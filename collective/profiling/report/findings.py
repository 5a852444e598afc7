"""Says in words what stands out in a profile."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median, quantiles

from collective.plan.formatting import imbalance, in_bytes
from collective.profiling.report.phases import EXCHANGES, INPUT, OUTSIDE, REST, WAITING, by_phase
from collective.profiling.report.profile import Profile

# The shares of a step from which a phase is worth a sentence.
MUCH_WAITING, MUCH_INPUT, MUCH_OUTSIDE, MUCH_REST = 0.1, 0.2, 0.15, 0.3
# The most keys that a rank is asked for, divided by the mean.
UNEVEN = 1.25
# The longest step, divided by the shortest.
UNSTEADY = 2.0
# Bytes per millisecond that a rank receives in exchanges; slower ones don't depend on bytes.
SLOW = 50_000
MUCH_EXCHANGED = 0.2
# A rank that waits less than this share of the mean keeps the others waiting.
WAITS_LITTLE = 0.5
# The share of the bytes of all tables.
MUCH_OF_ONE_TABLE = 0.5


def mean_phases(profile: Profile) -> dict[str, float]:
    """Returns milliseconds by phase, the mean over ranks."""
    sums: dict[str, float] = {}
    for phases in profile.phases:
        for name, ms in phases.items():
            sums[name] = sums.get(name, 0.0) + ms / len(profile.phases)
    return by_phase(sums)


def findings(profile: Profile) -> list[str]:
    """Returns sentences, the most important first."""
    return [*_of_time(profile), *_of_waiting(profile), *_of_owners(profile), *_of_bytes(profile)]


def last_to_come(profile: Profile) -> int:
    """Returns the rank that waits least: the others wait for it."""
    waits = [by_phase(phases).get(WAITING, 0.0) for phases in profile.phases]
    return waits.index(min(waits))


def _of_time(profile: Profile) -> Iterator[str]:
    phases, whole = mean_phases(profile), profile.mean_ms
    if not phases or whole <= 0:
        return
    exchanged = sum(phases.get(name, 0.0) for name in EXCHANGES)
    largest = sorted(phases, key=lambda name: -phases[name])[:3]
    parts = ", ".join(f"{name} {phases[name] / whole:.0%}" for name in largest)
    sentence = f"A step takes {whole:.2f} ms. Most of it: {parts}."
    if profile.size > 1:
        sentence += f" All exchanges together take {exchanged / whole:.0%}, waiting not counted."
    yield sentence
    yield from _of_steadiness(profile)
    yield from _of_slow_exchanges(profile, exchanged)
    if phases.get(INPUT, 0.0) > MUCH_INPUT * whole:
        yield (
            f"Its input takes {phases[INPUT]:.2f} ms of a step: look at prefetching, and at how "
            "many threads parse, before anything about tables."
        )
    if phases.get(OUTSIDE, 0.0) > MUCH_OUTSIDE * whole:
        yield (
            f"{phases[OUTSIDE]:.2f} ms pass between two runs, in hooks and in the script's own "
            "Python. Nothing of the model runs meanwhile."
        )
    if phases.get(REST, 0.0) > MUCH_REST * whole:
        yield (
            f"For {phases[REST]:.2f} ms of a step no operation is at work. That is TensorFlow's "
            "own part of a run, and of tracing it; larger batches spread it over more samples."
        )


def profiled_ms(profile: Profile) -> list[float]:
    """Returns the milliseconds of each profiled step; [] if only their mean was saved."""
    steps, times = profile.history.get("step", []), profile.history.get("ms", [])
    return [ms for step, ms in zip(steps, times) if profile.first <= step <= profile.last]


def overlap(before: Profile, after: Profile) -> str | None:
    """Says that two profiles may differ by chance: the middle halves of their steps overlap."""
    of_both = [profiled_ms(before), profiled_ms(after)]
    if min(map(len, of_both)) < 4 or before.mean_ms == after.mean_ms:
        return None
    (low, _, high), (other_low, _, other_high) = (
        quantiles(ms, n=4, method="inclusive") for ms in of_both
    )
    if high < other_low or other_high < low:
        return None
    return (
        f"The difference may be chance: the middle half of A's steps took {low:.2f} to {high:.2f} "
        f"ms, that of B's {other_low:.2f} to {other_high:.2f} ms. Profile both again, on a machine "
        "that does nothing else."
    )


def _of_steadiness(profile: Profile) -> Iterator[str]:
    ms = profiled_ms(profile)
    if len(ms) > 1 and max(ms) > UNSTEADY * min(ms):
        yield (
            f"The profiled steps were uneven: {min(ms):.2f} to {max(ms):.2f} ms, the median "
            f"{median(ms):.2f} ms. The means below mix fast and slow steps: profile later steps, "
            "or more of them, on a machine that does nothing else."
        )


def _of_slow_exchanges(profile: Profile, exchanged: float) -> Iterator[str]:
    is_much = exchanged > MUCH_EXCHANGED * profile.mean_ms
    if profile.size > 1 and is_much and profile.bytes_per_step < SLOW * exchanged:
        yield (
            f"The exchanges bring {in_bytes(profile.bytes_per_step)} to a rank in {exchanged:.2f} "
            "ms: they take as long as they do for their number, or for want of processors, not for "
            "their bytes. Larger batches and local_steps help; narrower types on the wire don't."
        )


def _of_waiting(profile: Profile) -> Iterator[str]:
    waiting, whole = mean_phases(profile).get(WAITING, 0.0), profile.mean_ms
    if len(profile.ms) < 2 or waiting <= MUCH_WAITING * whole:
        return
    rank = last_to_come(profile)
    own = by_phase(profile.phases[rank])
    sentence = f"Ranks wait for each other for {waiting:.2f} ms of a step ({waiting / whole:.0%}). "
    if own.get(WAITING, 0.0) > WAITS_LITTLE * waiting:
        yield sentence + (
            "No rank is always the last: they take turns, as they do where several ranks share "
            "processors or batches differ in size."
        )
        return
    others = [by_phase(phases) for r, phases in enumerate(profile.phases) if r != rank]
    surplus = {
        name: ms - sum(each.get(name, 0.0) for each in others) / len(others)
        for name, ms in own.items()
        if name != WAITING and name not in EXCHANGES
    }
    yield sentence + (
        f"Rank {rank} waits least ({own.get(WAITING, 0.0):.2f} ms), so the others wait for it most."
    )
    if surplus:
        name = max(surplus, key=lambda each: surplus[each])
        if surplus[name] > 0.25 * waiting:
            yield (
                f"What rank {rank} spends more time on than the others is {name}: "
                f"{own[name]:.2f} ms, {surplus[name]:.2f} ms more than their mean."
            )


def _of_owners(profile: Profile) -> Iterator[str]:
    keys, ratio = profile.keys_by_owner, profile.key_imbalance
    if len(keys) < 2 or ratio is None or ratio <= UNEVEN:
        return
    rank = keys.index(max(keys))
    mean = sum(keys) / len(keys)
    surplus_by_table = {
        name: of_table[rank] - sum(of_table) / len(of_table)
        for name, of_table in profile.keys_per_owner.items()
    }
    table = max(surplus_by_table, key=lambda name: surplus_by_table[name])
    ratio_of_table = imbalance(profile.keys_per_owner[table]) or 1.0
    yield (
        f"Rank {rank} is asked for {keys[rank]:,.0f} keys a step, {keys[rank] / mean:.2f} times "
        f"the mean. Table {table} adds most to that (its own ratio: {ratio_of_table:.2f})."
    )


def _of_bytes(profile: Profile) -> Iterator[str]:
    sizes = {name: sum(of.values()) for name, of in profile.table_bytes.items()}
    total = sum(sizes.values())
    if len(sizes) > 1 and total > 0:
        name = max(sizes, key=lambda each: sizes[each])
        if sizes[name] > MUCH_OF_ONE_TABLE * total:
            yield (
                f"Table {name} makes up {sizes[name] / total:.0%} of the bytes that are exchanged "
                "for tables."
            )
