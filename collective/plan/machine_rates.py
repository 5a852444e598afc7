"""Measures how fast CPU ranks compute and exchange on their machines, and keeps it for next time.

All ranks measure at the same time, in about a second, and the slowest rank counts: bytes of rows
that are read and written, operations of a matrix product, and an all-to-all by the carrier in
force, once of next to nothing and once of many bytes. Other work on the machine can only make a
trial slower, so the best of several trials counts.

Rank 0's host keeps the figures in a file of its user's cache (XDG_CACHE_HOME, ~/.cache), one for
each host name, processor, number of cores, spread of ranks, carrier, and version of the library.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf

from collective.coordination import barrier
from collective.job.machine import available_cores
from collective.ops.communication import carrier_choice, collectives, membership
from collective.ops.graph.sessions import run_unpatched, session_before_scripts
from collective.planner.machines import Figure
from collective.version import __version__

FORMAT = 1
TRIALS = 5
# Rows of 256 bytes: 64 MB of them, more than caches hold, of which some are read.
ROWS, DIMENSION, ROWS_READ = 1 << 18, 64, 1 << 16
SIDE = 512  # of the matrices of a product
# All-to-alls of a run, of next to nothing and of many bytes, and what a rank gives to the latter.
WAITS, LARGE = 32, 4
BYTES = {"within": 4 << 20, "between": 1 << 20}
# Figures of which less is better; of all others more is.
SECONDS = ("within_wait", "between_wait")


def measured() -> dict[str, Figure]:
    """Measures and keeps the figures; all ranks call it at the same time, and get the same.

    Returns:
        Figures by their names in `planner.machines.Device`.

    Raises:
        RankError: a rank does something else, or has failed.
    """
    of_ranks = barrier.run_on_all_ranks(None, "measures the machines", _measure)
    values = {
        name: (max if name in SECONDS else min)(own[name] for own in of_ranks)
        for name in of_ranks[0]
    }
    source = "when this job started"
    if collectives.rank() == 0:
        try:
            _keep(values)
        except OSError as error:
            source += f"; not kept: {error}"
    return {name: Figure(value, "measured", source) for name, value in values.items()}


def kept() -> dict[str, Figure]:
    """Returns the figures that this host keeps for a job like this one; none if it keeps none.

    A file that says anything else than this module writes is taken for none.
    """
    path = file()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["machine"] != _machine():
            return {}
        when, values = str(content["measured"]), dict(content["values"])
        figures = {
            str(name): Figure(float(value), "kept", f"measured on {when} ({path})")
            for name, value in values.items()
        }
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    usable = all(math.isfinite(f.value) and f.value > 0 for f in figures.values())
    return figures if usable and set(figures) == _names() else {}


def file() -> Path:
    """Returns the file in which this host keeps the figures of a job like this one."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    described = json.dumps(_machine(), sort_keys=True)
    digest = hashlib.blake2b(described.encode(), digest_size=6).hexdigest()
    return Path(cache).expanduser() / "collective" / f"machine-{socket.gethostname()}-{digest}.json"


def _machine() -> dict[str, Any]:
    """Returns what the figures depend on."""
    process = membership.place()
    return {
        "host": socket.gethostname(),
        "processor": _processor(),
        "cores": available_cores(),
        "ranks": process.size,
        "ranks of a host": process.local_size,
        "carrier": carrier_choice.in_force(),
        "version": __version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else ""


def _keep(values: dict[str, float]) -> None:
    content = {
        "format": FORMAT,
        "machine": _machine(),
        "measured": time.strftime("%Y-%m-%d"),
        "values": values,
    }
    path = file()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _spread() -> tuple[str, bool]:
    """Returns where the ranks' collectives go, 'within' a host or 'between' hosts, and whether all
    that a rank sends to others goes there.

    Ranks of hosts with several each have measured both rates when they joined
    (`ops/communication/hierarchy.py`).
    """
    process = membership.place()
    if process.local_size == process.size:
        return "within", True
    return "between", process.local_size == 1


def _names() -> set[str]:
    """Returns the names of what is measured in this job."""
    names = {"memory_rate", "flops"}
    if membership.place().size > 1:
        where, is_all = _spread()
        names |= {f"{where}_wait", f"{where}_rate"} if is_all else {f"{where}_wait"}
    return names


def _measure() -> dict[str, float]:
    """Returns what this rank measures, by the names of figures."""
    ranks, (where, is_all) = collectives.size(), _spread()
    values = {"memory_rate": _memory_rate()}
    with tf.Graph().as_default(), tf.device("/cpu:0"), session_before_scripts() as session:

        def seconds(operation: tf.Operation) -> float:
            return _least(lambda: run_unpatched(session, operation))

        matrix = tf.random.uniform([SIDE, SIDE])
        values["flops"] = 2 * SIDE**3 / seconds(tf.matmul(matrix, matrix).op)
        if ranks > 1:
            values[f"{where}_wait"] = seconds(_exchanges(1, WAITS)) / WAITS
        if ranks > 1 and is_all:
            share = BYTES[where] // ranks  # to each rank
            duration = seconds(_exchanges(share, LARGE)) / LARGE
            values[f"{where}_rate"] = share * (ranks - 1) / duration
    return values


def _memory_rate() -> float:
    """Returns the bytes per second that are read and written when rows are gathered."""
    rows = np.ones([ROWS, DIMENSION], np.float32)
    places = np.random.default_rng(0).permutation(ROWS)[:ROWS_READ]
    gathered = np.empty([ROWS_READ, DIMENSION], np.float32)
    seconds = _least(lambda: np.take(rows, places, 0, out=gathered, mode="clip"))
    return 2 * gathered.nbytes / seconds


def _exchanges(share: int, links: int) -> tf.Operation:
    """Returns the last of a chain of all-to-alls in which a rank gives `share` bytes to each."""
    ranks = collectives.size()
    data, splits = tf.zeros([share * ranks], tf.uint8), tf.fill([ranks], share)
    for _ in range(links):
        data, _ = collectives.alltoall(data, splits, collectives.unique_name("machine_rates"), 0)
    return data.op


def _least(run: Callable[[], Any]) -> float:
    """Returns the seconds of the best of `TRIALS` calls, after one that warms up."""
    times = []
    for _ in range(1 + TRIALS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return max(min(times[1:]), 1e-9)
