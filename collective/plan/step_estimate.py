"""Estimates whether sharding pays: a step on all ranks compared with one rank's.

The model, with S samples in a step of N ranks:

    one rank     FIXED + S * t                  t = rows / ROW_RATE + 6 * parameters / FLOP_RATE
    N ranks      FIXED + S / N * (t + 2 * rows / rate)
                 + exchanges * exchange + 8 * parameters / rate

`rows` is the bytes of the table rows that a sample's ids name, `parameters` the number of elements
of the replicated variables: each takes two floating-point operations per sample in the forward pass
and four in the backward pass. Rows are sent to the requester, and their gradients to the owner.
Dense gradients are sent once in each direction. The carrier determines the time of an exchange and
the rate.

The constants were measured on one machine of two cores, with two CPU ranks, by
benchmarks/small_models.py and benchmarks/step.py (see benchmarks/RESULTS.md). They favour sharding:
they assume rather slow computing and rather quick exchanges. The model covers only CPU ranks and
small tables, and its output says that it is an estimate.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap

from collective.ops.counting import counted
from collective.plan.data import PlanData, StepEstimate

FIXED_MS = 0.8  # of a run of any graph
ROW_RATE = 0.6e9  # bytes of rows a second: looked up, their gradients summed, updated
FLOP_RATE = 50e9  # floating-point operations a second


@dataclasses.dataclass(frozen=True)
class Wire:
    """Holds the ms of a collective that carries almost nothing, and the bytes per second."""

    exchange_ms: float
    rate: float


HOROVOD, SHARED_MEMORY = Wire(0.35, 2.6e9), Wire(0.03, 8e9)


# Tables and slots of fewer bytes are small: any rank could hold them all.
SMALL_BYTES = 1e9
# All ranks together must be so many times slower than one before anybody is told.
CLEARLY_SLOWER = 1.3
# Where the samples of a step aren't known: nobody is told of fewer than these.
USUAL_SAMPLES = 512
COLUMNS = 118


@dataclasses.dataclass(frozen=True)
class StepWork:
    """Describes what determines the time of a step of N ranks.

    Attributes:
        ranks: N.
        exchanges: the collectives of a step.
        row_bytes: the bytes of the table rows that one sample's ids name, above 0.
        parameters: the elements of all replicated variables that are trained.
        samples: the samples of a step, all ranks together; None if the graph doesn't determine
            them.
        wire: the carrier's times.
    """

    ranks: int
    exchanges: int
    row_bytes: float
    parameters: int
    samples: int | None
    wire: Wire = SHARED_MEMORY


def estimate(work: StepWork) -> StepEstimate:
    """Estimates the times of a step, and the number of samples above which sharding pays."""
    sample_ms = 1e3 * (work.row_bytes / ROW_RATE + 6 * work.parameters / FLOP_RATE)
    travel_ms = 1e3 * 2 * work.row_bytes / work.wire.rate
    exchanges_ms = (
        work.exchanges * work.wire.exchange_ms + 1e3 * 8 * work.parameters / work.wire.rate
    )
    saved_ms = sample_ms - (sample_ms + travel_ms) / work.ranks  # by each sample
    break_even = math.ceil(exchanges_ms / saved_ms)
    if work.samples is None:
        return StepEstimate(None, None, None, break_even)
    one_rank_ms = FIXED_MS + work.samples * sample_ms
    all_ranks_ms = FIXED_MS + work.samples * (sample_ms + travel_ms) / work.ranks + exchanges_ms
    return StepEstimate(work.samples, one_rank_ms, all_ranks_ms, break_even)


def advice(plan: PlanData) -> list[str]:
    """Says if sharding clearly doesn't pay, and what to try: two lines, or none."""
    estimated = plan.estimate
    if estimated is None or not _is_small(plan):
        return []
    ranks = counted(plan.ranks, "rank")
    samples, break_even = estimated.samples or 0, _rounded(estimated.break_even_samples)
    if estimated.one_rank_ms is not None and estimated.all_ranks_ms is not None:
        if estimated.all_ranks_ms < CLEARLY_SLOWER * estimated.one_rank_ms:
            return []
        claim = (
            f"An estimate: sharding doesn't pay here. A step of {counted(samples, 'sample')} "
            f"takes {estimated.all_ranks_ms:.1f} ms on {ranks}, {estimated.one_rank_ms:.1f} ms on "
            "one."
        )
    else:
        if estimated.break_even_samples < USUAL_SAMPLES:
            return []
        claim = (
            f"An estimate: with fewer than {counted(break_even, 'sample')} in a "
            f"step of {ranks} sharding doesn't pay: one rank alone is faster."
        )
    wanted = (
        "Try larger batches, scope(local_steps=…), embedding_scope(replicate_below='1 MB') for "
        "small tables, or one rank."
    )
    return textwrap.wrap(f"{claim} {wanted}", COLUMNS)


def _is_small(plan: PlanData) -> bool:
    """Returns whether all tables are known to fit on one rank."""
    total = 0
    for table in plan.tables:
        copies = table.shard_bytes[: 1 if table.placement == "replicated" else None]
        for size in copies:
            if size is None:
                return False
            total += size
    return total < SMALL_BYTES


def _rounded(number: int) -> int:
    """Rounds to two digits: it is an estimate."""
    digits = len(str(number)) - 2
    return round(number, -digits) if digits > 0 else number
