"""Draws tables and machines for which it isn't clear which placement is better."""

from __future__ import annotations

import random
from collections.abc import Sequence

from collective.planner import first_placements
from collective.planner.machines import Device, Figure, Machines
from collective.planner.step_model import StepModel
from collective.planner.workload import OPTIMIZERS, TableWork, Workload


def device(**changes: float) -> Device:
    """A device of round numbers: 1 GB/s of memory and wires, 1 ms for whatever has a fixed time."""
    values = {
        "memory": 1e9,
        "memory_rate": 1e9,
        "flops": 1e12,
        "within_rate": 1e9,
        "between_rate": 1e8,
        "start": 1e-6,
        "id_time": 1e-12,
        "within_wait": 1e-3,
        "between_wait": 2e-3,
        "usable": 1.0,
        "memory_share": 1.0,
        "wire_share": 1.0,
        "flop_share": 1.0,
        **changes,
    }
    return Device("D-1GB", **{name: Figure(v, "given", "here") for name, v in values.items()})


CLUSTERS = [(2, 1), (8, 1), (8, 2), (8, 8), (4, 4)]  # ranks of a host, hosts


def problem(
    seed: int,
    most_tables: int,
    least_tables: int = 1,
    clusters: Sequence[tuple[int, int]] = CLUSTERS,
) -> tuple[Workload, Machines]:
    """Draws tables of all kinds, a step, and a cluster."""
    draw = random.Random(seed)
    tables = tuple(
        TableWork(
            f"t{i}",
            rows=int(10 ** draw.uniform(1, 5)),
            dimension=draw.choice([1, 4, 16, 64]),
            type=draw.choice(["float32", "float32", "float16"]),
            ids=draw.choice([0.1, 1, 1, 10]),
            distinct=draw.choice([None, None, 0.5, 1.0]),
            optimizer=draw.choice(sorted(OPTIMIZERS)),
            imbalance=draw.choice([1.0, 1.0, 1.5, 3.0]),
            dynamic=draw.random() < 0.1,
            bounded=draw.random() < 0.1,
        )
        for i in range(draw.randint(least_tables, most_tables))
    )
    ranks_of_host, hosts = draw.choice(clusters)
    rates = {
        "between_rate": 10 ** draw.uniform(5, 9),
        "within_rate": 10 ** draw.uniform(7, 11),
        "memory_rate": 10 ** draw.uniform(9, 12),
        "start": 10 ** draw.uniform(-9, -5),
        "within_wait": 10 ** draw.uniform(-5, -3),
        "between_wait": 10 ** draw.uniform(-5, -3),
    }
    workload = Workload(tables, draw.choice([64, 1024, 65536]), draw.choice([0, 10**5]))
    machines = Machines(device(**rates, memory=1e15), ranks_of_host * hosts, hosts)
    model = StepModel(workload, machines)
    by_rows, most = (
        model.bytes_of(first_placements.all_of(model, kind)) for kind in ("rows", "replicated")
    )
    # From too little for anything but rows to enough for everything.
    memory = by_rows + draw.choice([0.001, 0.1, 0.5, 1.0]) * (most - by_rows) + 1
    return workload, Machines(device(**rates, memory=memory), machines.ranks, hosts)
