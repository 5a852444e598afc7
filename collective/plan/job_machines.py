"""Describes this job's machines for the planner, and lets all ranks agree on what they plan by.

Rank 0's answer counts: its file of tables, its figures. So all ranks choose the same placements
even if their files or hosts differ.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination import barrier
from collective.job.machine import memory_bytes
from collective.ops import kernel_device
from collective.ops.communication import collectives, hierarchy, membership
from collective.planner import published, tables_file
from collective.planner.machines import Device, Figure, Machines
from collective.tables.automatic_placement import AUTOMATIC, Basis

THIS_JOB = "this job"  # in strategy.plan(devices=…)
WITHOUT_FILE = "with assumed ids, one of each table in a sample"


def agree(file: str) -> Basis:
    """Returns what all ranks choose placements by; all ranks call it at the same time.

    Args:
        file: of tables, from an earlier run; '' for none. It may be missing, as before the first
            run.

    Raises:
        RankError: a rank does something else.
        ValueError: rank 0's file isn't a file of tables, or can't be read; on every rank.
    """
    own: dict[str, Any] = {}
    if collectives.rank() == 0:
        own = {"machines": dataclasses.asdict(of_job()), **_read(file)}
    what = "chooses the placements of tables" + (f" by {file}" if file else "")
    first = barrier.exchange(None, what, own)[0]
    if "problem" in first:
        raise ValueError(f"embedding_scope(placement='auto:{file}'): {first['problem']}")
    workload = None
    source = WITHOUT_FILE
    if first.get("missing"):
        source = f"{WITHOUT_FILE}, since {file} isn't there yet"
        if collectives.rank() == 0:
            tf.logging.warning(
                "embedding_scope(placement='auto:%s'): there is no such file. Tables are placed by "
                "assumed ids. scope(profile=FOLDER) writes FOLDER/tables.yml, which the next start "
                "can use.",
                file,
            )
    elif file:
        workload = tables_file.parse(first["text"], file).workload()
        source = f"by {file}"
    machines = Machines.of_dict(first["machines"])
    return Basis(machines, workload, f"{source}; for {machines.name}")


def _read(file: str) -> dict[str, Any]:
    """Returns the text of a file, or what is wrong with it."""
    if not file:
        return {}
    if not os.path.exists(file):
        return {"missing": True}
    try:
        with open(file, encoding="utf-8-sig") as opened:
            text = opened.read()
        tables_file.parse(text, file)
    except (OSError, ValueError) as error:
        return {"problem": str(error)}
    return {"text": text}


def of_job() -> Machines:
    """Returns this job's machines, as this rank sees them; ranks of equal hosts see the same.

    Their figures are those of devices of their kind. CPU ranks of several hosts have measured how
    fast they send, when they started (`ops/communication/hierarchy.py`). Hosts with different
    numbers of ranks are taken for as many hosts as there are ranks.
    """
    process = membership.place()
    hosts = process.size // process.local_size if process.local_size else process.size
    if hosts * process.local_size != process.size:
        hosts = process.size
    return Machines(_device(process.local_size), process.size, hosts)


def _device(local_size: int) -> Device:
    """Returns this rank's device."""
    gpus = tf.config.list_physical_devices("GPU")
    if kernel_device.chosen() != "cpu" and gpus:
        name = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "")
        return published.named(name)
    memory = Figure(memory_bytes() / max(local_size, 1), "measured", "this host's, by its ranks")
    device = dataclasses.replace(published.CPU, memory=memory)
    rates = hierarchy.bandwidths()
    if rates is None:
        return device
    within, between = (Figure(rate, "measured", "when the ranks started") for rate in rates)
    return dataclasses.replace(device, within_rate=within, between_rate=between)


def connect() -> None:
    """Has tables of embedding_scope(placement='auto') placed by what ranks agree on."""
    AUTOMATIC.connect(agree)
