"""Says how good a model of clicks is, and what its training took."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from pathlib import Path

from common.click_source import Source
from common.counting import counted


def scores(auc: float, log_loss: float, source: Source, step: int) -> str:
    """Returns the line of an evaluation and, where the best possible AUC is known, one with it."""
    lines = [
        f"test AUC {auc:.4f}  log loss {log_loss:.4f}  "
        f"({counted(source.count('test'), 'row')}, after step {step})"
    ]
    if source.reference:
        lines.append(source.reference)
    if source.best_auc is not None:
        lines.append(
            f"{way(auc, source.best_auc):.1%} of the way from 0.5 to the best possible AUC"
        )
    return "\n".join(lines)


def way(auc: float, best_auc: float) -> float:
    return (auc - 0.5) / (best_auc - 0.5)


def cost(samples_per_second: float) -> str:
    """Returns the line on speed and on the largest memory that this process has had."""
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return f"{samples_per_second:,.0f} samples/s of all ranks, {megabytes:,.0f} MB on rank 0"


def write_predictions(
    folder: str, rank: int, ranks: int, probabilities: Iterable[float], stride: int
) -> Path:
    """Writes lines 'row <tab> probability' of one rank.

    Args:
        folder: is created if it doesn't exist.
        rank, ranks: name the file.
        probabilities: of the rows rank, rank + stride, rank + 2 stride, ….
        stride: the distance of the rows.
    """
    os.makedirs(folder, exist_ok=True)
    path = Path(folder) / f"predictions-{rank:05d}-of-{ranks:05d}.tsv"
    with open(path, "w") as file:
        for number, probability in enumerate(probabilities):
            file.write(f"{rank + number * stride}\t{probability:.6f}\n")
    return path
