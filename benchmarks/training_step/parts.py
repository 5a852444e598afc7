"""Takes a step apart, from TensorFlow's traces of it on all ranks.

    python            what a run costs outside of TensorFlow's executor: Session.run, feeds, fetches
    agreement, keys, rows, gradients, dense gradients
                      a collective's own part: from when the last rank has come to it
    waiting           in collectives, for a rank that comes later
    gate              the other operations by which ranks agree on the run, and open its gate
    computing         all other operations, one after the other
    scheduling        the rest: the executor's threads between two operations

They add up to the step where a rank has one thread that runs operations. Traces slow a step down:
the parts say where time goes, not how long a step takes.
"""

from __future__ import annotations

import re
import statistics
from typing import Any

COLLECTIVES = ("agreement", "keys", "rows", "gradients", "dense gradients")
PARTS = ("python", *COLLECTIVES, "waiting", "gate", "computing", "scheduling")
_NAME = re.compile(r"(?:^|/)collective\.([^/:]+)$")
_CARRIED = re.compile(r"= (Horovod|CollectiveShared|CollectiveNccl)")


def collective_of(name: str) -> str | None:
    """Returns which of COLLECTIVES an operation of a carrier is, by its name."""
    found = _NAME.search(name)
    if found is None:
        return None
    base = found[1]
    if base.startswith("agreement"):
        return "agreement"
    if base.startswith("dense_gradients"):
        return "dense gradients"
    phase = re.search(r"\.(keys|rows)(?:\.\d+)?((?:\.gradient(?:\.\d+)?)*)$", base)
    if phase is None:
        return None
    return "gradients" if phase[2] else phase[1]


def times_of(trace: Any, wall_ms: float) -> dict[str, Any]:
    """Reads off a trace (RunMetadata) what the ranks bring together: JSON, in microseconds.

    Returns:
        'wall'; 'span' of the executor; 'gate' and 'computing', sums over operations; 'collectives',
        {name: (part, start, end)} by a clock that all ranks of a host share.
    """
    gate = computing = 0.0
    first, last = float("inf"), 0.0
    collectives: dict[str, tuple[str, float, float]] = {}
    for device in trace.step_stats.dev_stats:
        for node in device.node_stats:
            start = node.all_start_nanos / 1e3
            end = start + node.all_end_rel_nanos / 1e3
            first, last = min(first, start), max(last, end)
            part = collective_of(node.node_name)
            if part is not None and _CARRIED.search(node.timeline_label):
                collectives[node.node_name] = (part, start, end)
            elif "collective/agreement" in node.node_name:
                gate += end - start
            elif "collective/gate" in node.node_name:
                continue  # It takes as long as everything in front of it.
            else:
                computing += end - start
    return {
        "wall": wall_ms * 1e3,
        "span": last - first,
        "gate": gate,
        "computing": computing,
        "collectives": collectives,
    }


def parts_of(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the milliseconds of each part of a step, the mean over the ranks.

    Args:
        ranks: for each rank what `times_of` says of the same step.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    for rank in ranks:
        in_collectives = 0.0
        for name, (part, start, end) in rank["collectives"].items():
            others = [other["collectives"].get(name) for other in ranks]
            ready = min(max(start, *(of_rank[1] for of_rank in others if of_rank)), end)
            parts["waiting"] += ready - start
            parts[part] += end - ready
            in_collectives += end - start
        parts["python"] += rank["wall"] - rank["span"]
        parts["gate"] += rank["gate"]
        parts["computing"] += rank["computing"]
        parts["scheduling"] += rank["span"] - in_collectives - rank["gate"] - rank["computing"]
    return {part: microseconds / 1e3 / len(ranks) for part, microseconds in parts.items()}


def medians(steps_of_ranks: list[list[dict[str, Any]]]) -> dict[str, float]:
    """Returns the median milliseconds of each part, over the same steps of all ranks."""
    steps = [parts_of(list(ranks)) for ranks in zip(*steps_of_ranks)]
    return {part: statistics.median(step[part] for step in steps) for part in PARTS}
