"""Describes this job's machines for the planner, and lets all ranks agree on what they plan by.

Rank 0's answer counts: its file of tables, the figures that its host keeps. If it keeps none, all
ranks measure them (`machine_rates.py`). So all ranks choose the same placements even if their files
or hosts differ.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from collective.coordination import barrier
from collective.job.machine import memory_bytes
from collective.ops import kernel_device
from collective.ops.communication import collectives, hierarchy, membership
from collective.plan import machine_rates
from collective.planner import published, tables_file
from collective.planner.machines import Device, Figure, Machines
from collective.tables.automatic_placement import AUTOMATIC, Basis

THIS_JOB = "this job"  # in strategy.plan(devices=…)
# What this job has measured, by the names of figures; the same on all ranks.
_MEASURED: dict[str, Figure] = {}
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
        own["measure"] = collectives.size() > 1 and _is_to_measure()
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
    if first["measure"]:
        _MEASURED.update(machine_rates.measured())
    machines = _with(Machines.of_dict(first["machines"]), _MEASURED)
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

    Figures of GPUs are those of devices of their kind. CPU ranks of several hosts have measured how
    fast they send, when they started (`ops/communication/hierarchy.py`). The other figures of CPU
    ranks are what this job has measured, or an earlier one on this host; until then, what was
    measured elsewhere. Hosts with different numbers of ranks are taken for as many hosts as there
    are ranks.
    """
    process = membership.place()
    hosts = process.size // process.local_size if process.local_size else process.size
    if hosts * process.local_size != process.size:
        hosts = process.size
    machines = Machines(_device(process.local_size), process.size, hosts)
    return _with(machines, _MEASURED or machine_rates.kept()) if _has_cpus() else machines


def measured() -> Machines:
    """Returns the machines of a job of one rank, which measures what no file keeps."""
    if collectives.size() == 1 and _is_to_measure():
        _MEASURED.update(machine_rates.measured())
    return of_job()


def _is_to_measure() -> bool:
    return _has_cpus() and not _MEASURED and not machine_rates.kept()


def _with(machines: Machines, figures: Mapping[str, Figure]) -> Machines:
    changes: dict[str, Any] = dict(figures)
    return dataclasses.replace(machines, device=dataclasses.replace(machines.device, **changes))


def _has_cpus() -> bool:
    """Tells whether ranks compute with CPUs."""
    return kernel_device.chosen() == "cpu" or not tf.config.list_physical_devices("GPU")


def _device(local_size: int) -> Device:
    """Returns this rank's device."""
    if not _has_cpus():
        first = tf.config.list_physical_devices("GPU")[0]
        name = tf.config.experimental.get_device_details(first).get("device_name", "")
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
