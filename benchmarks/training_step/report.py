"""Turns the ranks' measurements of step.py into figures, JSON and tables.

A round holds the summary of each program that ran in it, by the program's name.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
from typing import Any

import numpy as np
import report

from training_step.workload import MergedKeys, Setting

Round = dict[str, dict[str, Any]]

MEDIANS = ("ms", "p90_ms", "cpu_ms", "bytes", "peak_rss_mb", "base_rss_mb")
# Relative: losses are means of sums of float32, formed in another order.
LOSS_TOLERANCE = 1e-4
# Of the bytes that a host sends, what merging on each host is to leave.
GOAL_BETWEEN_HOSTS = 0.6
# Options of scope() that round numbers, or take other steps, on purpose.
INEXACT = {"wire_dtype", "gradient_wire_dtype", "dense_compression", "local_steps"}


def summary(program: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarises the measurements of all ranks.

    A step takes as long as its slowest rank. The copies of `plain` don't wait for each other: the
    slower copy counts.
    """
    times = np.array([rank["times"] for rank in ranks])
    if not program.startswith("plain"):
        times = times.max(0, keepdims=True)
    return {
        "ms": float(np.median(times, 1).max()),
        "least_ms": float(times.min(1).max()),
        "p90_ms": float(np.percentile(times, 90, axis=1).max()),
        "cpu_ms": statistics.mean(rank["cpu_ms"] for rank in ranks),
        "losses": np.mean([rank["losses"] for rank in ranks], 0).tolist(),
        "bytes": round(statistics.mean(rank["bytes"] for rank in ranks)),
        "sent_by_host": round(statistics.mean(rank.get("sent_by_host", 0) for rank in ranks)),
        "collectives": ranks[0]["collectives"],
        "peak_rss_mb": max(rank["peak_rss_mb"] for rank in ranks),
        "base_rss_mb": ranks[0]["base_rss_mb"],
        "copying_ms": max(rank.get("copying_ms", 0.0) for rank in ranks),
    }


def check_losses(setting: Setting, round_: Round, other: str = "replicated") -> None:
    """Checks that `step` took the same steps as another program, if both ran.

    Raises:
        SystemExit: their losses differ.
    """
    if INEXACT & set(setting.scope) or not {"step", other} <= set(round_):
        return
    losses, other_losses = round_["step"]["losses"], round_[other]["losses"]
    if not np.allclose(losses, other_losses, rtol=LOSS_TOLERANCE, atol=0):
        worst = int(np.argmax(np.abs(np.subtract(losses, other_losses))))
        sys.exit(
            f"step.py: the loss of step {worst} is {losses[worst]:.6f} in `step`, but "
            f"{other_losses[worst]:.6f} in `{other}`: they must take the same steps on the same "
            "data."
        )


def median(rounds: list[Round], program: str, name: str) -> float | None:
    """Returns the median of a figure over the rounds; None if the program did not run."""
    if program not in rounds[0]:
        return None
    return round(statistics.median(round_[program][name] for round_ in rounds), 3)


def ratios(rounds: list[Round], name: str, above: str, *below: str) -> list[float]:
    """Returns a figure of one program over the sum of others, for each round.

    The list is empty if one of the programs did not run.
    """
    if not {above, *below} <= set(rounds[0]):
        return []
    quotients = []
    for round_ in rounds:
        divisor = sum(round_[program][name] for program in below)
        quotients.append(round(round_[above][name] / divisor, 3))
    return quotients


def median_ratio(rounds: list[Round], name: str, above: str, *below: str) -> float | None:
    quotients = ratios(rounds, name, above, *below)
    return round(statistics.median(quotients), 3) if quotients else None


def _keras_ratio(rounds: list[Round]) -> float | None:
    """Returns what a step of `fit` is of a session's step and plain Keras's own overhead."""
    if not {"keras", "step", "plain_keras", "plain"} <= set(rounds[0]):
        return None
    quotients = []
    for round_ in rounds:
        ms = {program: summarised["ms"] for program, summarised in round_.items()}
        overhead = max(0.0, ms["plain_keras"] - ms["plain"])
        quotients.append(ms["keras"] / (ms["step"] + overhead))
    return round(statistics.median(quotients), 3)


def figures(setting: Setting, rounds: list[Round], data_mb: float) -> dict[str, Any]:
    """Returns what --json prints: medians over the rounds."""
    first = rounds[0]
    step_ms = median(rounds, "step", "ms")
    counts = first.get("step", {}).get("collectives")
    programs = {}
    for program, summarised in first.items():
        programs[program] = {
            **{name: median(rounds, program, name) for name in MEDIANS},
            "collectives": summarised["collectives"],
            "losses": [summarised["losses"][0], summarised["losses"][-1]],
        }
    return {
        "step_ms": step_ms,
        "step_p90_ms": median(rounds, "step", "p90_ms"),
        "plain_ms": median(rounds, "plain", "ms"),
        "wire_ms": median(rounds, "wire", "ms"),
        "copying_ms": median(rounds, "wire", "copying_ms"),
        "replicated_ms": median(rounds, "replicated", "ms"),
        "ratio": median_ratio(rounds, "ms", "step", "plain", "wire"),
        "ratios": ratios(rounds, "ms", "step", "plain", "wire"),
        "cpu_ratio": median_ratio(rounds, "cpu_ms", "step", "plain", "wire"),
        "samples_per_s": step_ms and round(setting.samples * setting.ranks / step_ms * 1e3, 1),
        "bytes_per_step": first.get("step", {}).get("bytes"),
        "wire_bytes_per_step": first.get("wire", {}).get("bytes"),
        "collectives_per_step": counts and sum(counts.values()),
        "collectives": counts,
        "peak_rss_mb": median(rounds, "step", "peak_rss_mb"),
        "shard_mb": round(setting.shard_bytes() / 2**20, 1),
        "data_mb": data_mb,
        "keras_ratio": _keras_ratio(rounds),
        "keras_to_plain": median_ratio(rounds, "ms", "keras", "plain_keras"),
        "ratio_to": {program: median_ratio(rounds, "ms", program, "plain") for program in first},
        "programs": programs,
        "setting": dataclasses.asdict(setting),
        "load_average": os.getloadavg()[0],
    }


def title(setting: Setting, dims: str) -> str:
    """Returns the line above a table, which says what was measured."""
    ids = "-".join(map(str, sorted(set(setting.ids))))
    parts = [
        f"{setting.ranks} rank{'s' * (setting.ranks != 1)}",
        setting.backend,
        f"{setting.tables} table{'s' * (setting.tables != 1)} of dimension "
        f"{dims} ({sum(setting.rows()):,} rows)",
        f"{ids} id{'s' if setting.pooled else ''} a feature",
        f"{setting.samples} samples a rank",
        setting.optimizer,
        f"network {setting.network}",
        *(["dynamic tables"] if setting.dynamic else []),
        *(f"{name}={value:g}" for name, value in setting.policy.items()),
        *(f"{name}={value}" for name, value in setting.scope.items()),
    ]
    return ", ".join(parts) + "\n"


def program_table(setting: Setting, result: dict[str, Any]) -> str:
    """Formats the result of `figures`."""
    names = ["", "step ms", "p90", "÷ plain", "cpu ms", "samples/s", "MB a step", "collectives"]
    rows = []
    for name, program in result["programs"].items():
        rate = None if name == "wire" else setting.samples * setting.ranks / program["ms"] * 1e3
        rows.append(
            [
                name,
                report.number(program["ms"]),
                report.number(program["p90_ms"]),
                report.number(result["ratio_to"][name]),
                report.number(program["cpu_ms"]),
                report.number(rate, 0),
                report.number(program["bytes"] / 1e6),
                str(sum(program["collectives"].values())),
                report.number(program["peak_rss_mb"], 0),
            ]
        )
    lines = [title(setting, str(setting.dim)), report.table([*names, "peak RSS MB"], rows)]
    if result["ratio"] is not None:
        lines += ["", f"step ÷ (plain + wire) = {result['ratio']:.2f}{each_round(result)}"]
        lines[-1] += f"; of processor time {result['cpu_ratio']:.2f}"
    if result["keras_ratio"] is not None:
        lines += [
            "",
            "keras ÷ (step + plain_keras - plain), plain Keras's own overhead = "
            f"{result['keras_ratio']:.2f}; keras ÷ plain_keras = {result['keras_to_plain']:.2f}",
        ]
    if result["copying_ms"] is not None:
        copying = report.number(result["copying_ms"])
        lines += ["", f"Copying the bytes of `wire` once within a process takes {copying} ms."]
    return "\n".join(lines)


def comparison(setting: Setting, rounds: list[Round]) -> dict[str, Any]:
    """Returns the figures of `step` on this checkout and of `against`, the same on another one."""
    return {
        "dim": setting.dim,
        "step_ms": median(rounds, "step", "ms"),
        "against_ms": median(rounds, "against", "ms"),
        "step_cpu_ms": median(rounds, "step", "cpu_ms"),
        "against_cpu_ms": median(rounds, "against", "cpu_ms"),
        "ratio": median_ratio(rounds, "ms", "step", "against"),
        "ratios": ratios(rounds, "ms", "step", "against"),
        "cpu_ratio": median_ratio(rounds, "cpu_ms", "step", "against"),
    }


def comparison_table(setting: Setting, results: list[dict[str, Any]]) -> str:
    names = ["dimension", "step ms", "against", "ratio", "cpu ms", "against", "ratio", "rounds"]
    rows = []
    for result in results:
        numbers = [result[name] for name in ("step_ms", "against_ms", "ratio")]
        numbers += [result[name] for name in ("step_cpu_ms", "against_cpu_ms", "cpu_ratio")]
        ratios_of_rounds = ", ".join(f"{ratio:.2f}" for ratio in result["ratios"])
        rows.append([str(result["dim"]), *map(report.number, numbers), ratios_of_rounds])
    dims = " and ".join(str(result["dim"]) for result in results)
    return "\n".join([title(setting, dims), report.table(names, rows)])


def hosts_table(setting: Setting, hosts: int, link: str, rounds: list[Round]) -> str:
    """Formats the steps of `flat` and `hierarchical` exchanges between hosts."""
    names = ["", "step ms", "cpu ms", "MB a host sends a step", "÷ flat: ms", "MB"]
    rows = []
    for name in rounds[0]:
        sent = median(rounds, name, "sent_by_host")
        numbers = [median(rounds, name, "ms"), median(rounds, name, "cpu_ms"), sent and sent / 1e6]
        numbers += [median_ratio(rounds, key, name, "flat") for key in ("ms", "sent_by_host")]
        rows.append([name, *map(report.number, numbers)])
    head = f"{hosts} hosts, {link}: {title(setting, str(setting.dim))}"
    return "\n".join([head, report.table(names, rows), merged_keys_text(setting, hosts)])


def merged_keys_text(setting: Setting, hosts: int) -> str:
    """Says what merging can save, and with how many samples it comes to the goal."""
    merged = MergedKeys(setting, hosts)
    samples = merged.samples_for(GOAL_BETWEEN_HOSTS)
    reached = f"from {samples:,} samples of a rank on" if samples else "with no batch"
    return (
        f"distinct keys of a host's {setting.ranks // hosts} ranks together ÷ the sum of each's: "
        f"{merged.share(setting.samples):.2f} with {setting.samples:,} samples of a rank, at most "
        f"{GOAL_BETWEEN_HOSTS:g} {reached}"
    )


def each_round(result: dict[str, Any]) -> str:
    if len(result["ratios"]) < 2:
        return ""
    return f" (rounds: {', '.join(map(str, result['ratios']))})"
