"""Checks and measurements of a whole sparse step: everything that a rank does besides the dense
part, by the kernels of all families.

The DLRM workload: 26 tables of dimension 128, 65,536 samples, Adagrad, float32; ids are Zipf-like.
Three measurements of each batch on one rank, with 1 id a sample and table and with 1 to 10 that are
summed:

    step, …             the host waits for the numbers of distinct ids, as without prefetching it
    must
    step, …, prefetched  it knows them: the time of the kernels alone
    step, …, PyTorch    `pytorch.py`, where PyTorch can be imported and use the GPU

and one, `step, owner of 8`, of a rank's part as the owner of rows that 8 ranks ask for: the rows
that it answers with, and the update by the gradients that it gets. There keys are de-duplicated for
the update only; the host waits for their numbers, too.

The bytes of a step are a floor: what its stages must move if each reads and writes everything once,
and finds nothing of the stage before in a cache. With K ids, S = T B samples of all tables, U
distinct rows of dimension D:

    distinct    8 K ids read; 4 K of the inverse index and 8 U keys written
    pool        8 K ids, 4 S offsets and 4 D U, each row once, read; 4 D S written
    update      4 K of the inverse index, 4 D S gradients, 8 U row numbers, 8 D U weights and slots
    read; 8 D U written

and of the owner's part, with K keys of which U are distinct:

    answer      8 K keys and 4 D U, each row once, read; 4 D K written
    distinct    8 K keys read; 4 K of the inverse index and 8 U keys written
    update      4 K of the inverse index, 4 D K gradients, 8 U row numbers, 8 D U weights and slots
    read; 8 D U written

Scratch memory, orders of occurrences, and a row that is read again for another sample don't count:
they depend on the implementation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from collective.ops.gpu.checks import Measurement, Scale, pytorch, workload
from collective.ops.gpu.checks.inputs import on
from collective.ops.gpu.checks.sums import assert_close
from collective.ops.gpu.checks.workload import DIM, RANKS, RULE, SAMPLES, TABLES, Batch, Received
from collective.ops.gpu.device import Device
from collective.ops.gpu.distinct import distinct
from collective.ops.gpu.gather import gather
from collective.ops.gpu.occurrences import occurrences
from collective.ops.gpu.partition import local_rows
from collective.ops.gpu.pool import Ids, Lookup, pool, pool_terms
from collective.ops.gpu.reference import distinct as reference
from collective.ops.gpu.segments import STATIC, Segments
from collective.ops.gpu.sums import Rows
from collective.ops.gpu.update import Table, update
from collective.ops.gpu.workspace import Workspace

_KINDS = [STATIC] * TABLES


def step(
    tables: Sequence[Table], batch: Batch, workspace: Workspace, counts: np.ndarray | None = None
) -> list[Any]:
    """Returns the pooled rows, [B, D] float32 for each table, and updates the tables by the
    gradients.

    Args:
        tables: T of them.
        batch: on the device.
        workspace: holds the result until the next call with it.
        counts: [T], the number of distinct ids of each table; if None, the host waits for it.
    """
    device = workspace.device
    found = distinct(batch.ids, batch.segments, _KINDS, 1, workspace)
    segments = Segments.of(
        device.download(found.counts)[0] if counts is None else counts, range(TABLES)
    )
    rows = local_rows(found.keys[: segments.keys], segments, _KINDS, 1, workspace)
    lookups = [Lookup(len(batch.gradients) // TABLES, DIM, source=t) for t in range(TABLES)]
    shards = [Rows.of([table.weights], device) for table in tables]
    ids = Ids(batch.ids, batch.offsets)
    pooled = pool(lookups, shards, ids, workspace)
    gradients = Rows.of([batch.gradients], device)
    terms = pool_terms(lookups, shards, ids, gradients, workspace)
    occur = occurrences(found.inverse, segments.keys, workspace, terms=terms.terms)
    update(RULE, tables, rows, segments, gradients, occur, workspace)
    return pooled


def owned(tables: Sequence[Table], received: Received, workspace: Workspace) -> Any:
    """Returns [K D] float32, the requested rows, and updates the tables with their
    gradients.
    """
    device, asked = workspace.device, received.segments
    message = gather(
        [table.weights for table in tables],
        local_rows(received.keys, asked, _KINDS, RANKS, workspace),
        asked,
        workspace,
    )
    found = distinct(received.keys, asked, _KINDS, 1, workspace)
    segments = Segments.of(device.download(found.counts)[0], range(TABLES))
    rows = local_rows(found.keys[: segments.keys], segments, _KINDS, RANKS, workspace)
    update(
        RULE,
        tables,
        rows,
        segments,
        Rows.of([received.gradients], device),
        occurrences(found.inverse, segments.keys, workspace),
        workspace,
    )
    return message


def _tables(weights: Any, slots: Any) -> list[Table]:
    return [Table(weight, [slot]) for weight, slot in zip(weights, slots)]


class _Checked:
    """Holds tables on the device, and the truth in float64: [T, V, D] weights and slots."""

    def __init__(self, device: Device, rows: int, rng: np.random.Generator):
        shape = TABLES, rows, DIM
        self.weights, self.slots = (
            rng.standard_normal(shape).astype(np.float32),
            rng.uniform(0.5, 1.5, shape).astype(np.float32),
        )
        self.device, self.there = device, (on(device, self.weights), on(device, self.slots))

    def assert_updated(self, made: tuple[np.ndarray, np.ndarray], what: str) -> None:
        self.weights, self.slots = made
        for name, got, wanted in zip(("weights", "slots"), self.there, made):
            assert_close(self.device.download(got), wanted, 2e-5, f"{name} of {what}")


def _samples(scale: Scale) -> int:
    return max(scale.keys // 2048, 80)


def _batch(scale: Scale, most: int, rng: np.random.Generator) -> Batch:
    samples = _samples(scale)
    return workload.batch(
        samples,
        samples // 2,
        most,
        rng.standard_normal((TABLES * samples, DIM)).astype(np.float32),
        rng,
    )


def one_rank(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Checks the step with two batches of 1 id a sample and two of up to 10 against float64."""
    tables, workspace = _Checked(device, _samples(scale) // 2, rng), Workspace(device)
    for number, most in enumerate((1, 10, 1, 10)):
        batch = _batch(scale, most, rng)
        counts = (
            None
            if number < 2
            else reference.distinct(batch.ids, batch.segments, _KINDS, 1).counts[0]
        )
        wanted = list(workload.pooled(tables.weights, batch))
        for got, one in zip(
            step(_tables(*tables.there), batch.there(device), workspace, counts), wanted
        ):
            assert_close(device.download(got), one, 2e-5, f"look-ups of batch {number}")
        tables.assert_updated(
            workload.updated(tables.weights, tables.slots, batch), f"batch {number}"
        )


def owner(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Makes the owner's part of two batches of 8 ranks, compared with float64."""
    samples, workspace = _samples(scale), Workspace(device)
    tables = _Checked(device, samples // 4, rng)
    for number in range(2):
        asked = workload.received(samples, samples // 4, rng)
        asked = asked._replace(
            gradients=rng.standard_normal((len(asked.keys), DIM)).astype(np.float32)
        )
        table, rows = np.repeat(asked.segments.sections, asked.lengths), asked.keys // RANKS
        wanted = device.download(tables.there[0])[table, rows]
        got = owned(_tables(*tables.there), asked.there(device), workspace)
        np.testing.assert_array_equal(
            device.download(got).reshape(-1, DIM), wanted, f"rows of batch {number}"
        )
        made = [
            workload.stepped(
                tables.weights[t], tables.slots[t], rows[table == t], asked.gradients[table == t]
            )
            for t in range(TABLES)
        ]
        tables.assert_updated(
            (np.stack([one for one, _ in made]), np.stack([one for _, one in made])),
            f"batch {number}",
        )


def by_pytorch(device: Device, scale: Scale, rng: np.random.Generator) -> None:
    """Makes `one_rank`'s steps with PyTorch, for comparison; does nothing without
    PyTorch.
    """
    torch = pytorch.imported(device)
    if torch is None:
        return
    tables = _Checked(device, _samples(scale) // 2, rng)
    for most in (1, 10):
        batch = _batch(scale, most, rng)
        got = pytorch.Step(torch, *tables.there).given(batch.there(device))()
        wanted = np.concatenate(list(workload.pooled(tables.weights, batch)))
        assert_close(got.cpu().numpy(), wanted, 2e-5, f"look-ups of up to {most} ids by PyTorch")
        tables.assert_updated(
            workload.updated(tables.weights, tables.slots, batch), f"up to {most} ids by PyTorch"
        )


CHECKS = (one_rank, owner, by_pytorch)


def _bytes(ids: int, samples: int, rows: int) -> int:
    """Counts the bytes of a step, as in the module's docstring."""
    row = 4 * DIM
    return (
        (8 * ids + 4 * ids + 8 * rows)
        + (8 * ids + 4 * samples + row * (rows + samples))
        + (4 * ids + row * samples + (8 + 4 * row) * rows)
    )


def _owner_bytes(keys: int, rows: int) -> int:
    """Counts the bytes of the owner's part, as in the module's docstring."""
    row = 4 * DIM
    return (
        (8 + row) * keys
        + row * rows
        + (8 + 4) * keys
        + 8 * rows
        + (4 + row) * keys
        + (8 + 4 * row) * rows
    )


def measurements(device: Device, scale: Scale, rng: np.random.Generator) -> Iterator[Measurement]:
    """Measures what the module's docstring lists. All weights together have `measured_bytes`, and
    so have the slots.
    """
    rows = max(scale.measured_bytes // (4 * DIM) // TABLES, 64)
    samples = min(SAMPLES, scale.measured_keys // TABLES)
    there: Any = [device.zeros((TABLES, rows, DIM), np.float32) for _ in range(2)]
    there[1].fill(1)
    tables, torch = _tables(*there), pytorch.imported(device)
    gradients = device.zeros((TABLES * samples, DIM), np.float32)
    for most, ids in ((1, "1 id"), (10, "1 to 10 ids")):
        batches: list[Any] = [workload.batch(samples, rows, most, gradients, rng) for _ in range(2)]
        counts = [reference.distinct(one.ids, one.segments, _KINDS, 1).counts[0] for one in batches]
        size = sum(len(one.ids) for one in batches) // len(batches)
        row = partial(
            Measurement,
            bytes=_bytes(size, TABLES * samples, int(sum(map(sum, counts))) // len(batches)),
            dim=DIM,
            dtype="float32",
            keys=size,
        )
        batches = [
            one._replace(ids=on(device, one.ids), offsets=on(device, one.offsets))
            for one in batches
        ]
        workspace = Workspace(device)
        run = partial(step, tables, workspace=workspace)
        yield row(f"step, {ids}", [partial(run, one) for one in batches], waits=True)
        yield row(
            f"step, {ids}, prefetched",
            [partial(run, one, counts=known) for one, known in zip(batches, counts)],
        )
        del workspace, run
        if torch is not None:
            theirs = pytorch.Step(torch, *there)
            yield row(f"step, {ids}, PyTorch", [theirs.given(one) for one in batches], waits=True)
    asked: list[Any] = [workload.received(samples, rows, rng) for _ in range(2)]
    size = sum(len(one.keys) for one in asked) // len(asked)
    distinct_rows = sum(
        int(reference.distinct(one.keys, one.segments, _KINDS, 1).counts.sum()) for one in asked
    ) // len(asked)
    gradients = device.zeros((max(len(one.keys) for one in asked), DIM), np.float32)
    asked = [
        one._replace(keys=on(device, one.keys), gradients=gradients[: len(one.keys)])
        for one in asked
    ]
    run = partial(owned, tables, workspace=Workspace(device))
    yield Measurement(
        f"step, owner of {RANKS}",
        [partial(run, one) for one in asked],
        _owner_bytes(size, distinct_rows),
        DIM,
        "float32",
        size,
        waits=True,
    )
