"""Records the course of a training: the test AUC and what dynamic tables hold, over steps.

    step  auc     log_loss  rows    bytes      admitted  refused  returned  steps_to_live  capacity
    50    0.7012  0.4981    120000  4800000    …

The numbers of tables are sums over all ranks and all dynamic tables.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

import collective
from common.command_line import TrainingParser, whole_number

EVICTED_BY = ("steps_to_live", "capacity")  # options of `collective.TablePolicy`
COUNTS = ("rows", "bytes", "admitted", "refused", "returned", *EVICTED_BY)


def add_options(parser: TrainingParser) -> None:
    parser.add_argument(
        "--evaluate-steps",
        type=whole_number(1),
        help="evaluate after every so many steps, too",
    )
    parser.add_argument(
        "--course",
        help="a file for scores and the tables' rows after each evaluation of training, which "
        "loss_curve.py draws",
    )


class TrainingCourse:
    """Sums what the dynamic tables of the graph hold over all ranks, and records it.

    It is made in the graph whose tables it is about, after them.

    Args:
        every: how many steps there are between evaluations; None: there is one at the end.
        path: of the file, which rank 0 overwrites; None: nothing is recorded.
        rank: this process's rank.
        ranks: how many there are.
    """

    def __init__(self, every: int | None, path: str | None, rank: int, ranks: int):
        self._every, self._ranks = every, ranks
        self._path = path if rank == 0 else None
        variables = tf.global_variables()
        self._tables = [v for v in variables if isinstance(v, collective.DynamicTable)]
        if self._tables:
            shape = [len(self._tables), len(COUNTS)]
            self._counts = tf.placeholder(tf.float32, shape, name="table_counts")
            others = {v.ref() for v in tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)}
            # (*) a metric is of all ranks' numbers
            _, self._mean = tf.metrics.mean_tensor(self._counts, name="table_counts")
            states = tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)
            self._restart = tf.variables_initializer([v for v in states if v.ref() not in others])
        if self._path:
            with open(self._path, "w") as file:
                file.write("\t".join(["step", "auc", "log_loss", *COUNTS]) + "\n")

    def is_due(self, step: int) -> bool:
        return self._every is not None and step % self._every == 0

    def record(self, session: Any, step: int, scores: dict[str, float]) -> dict[str, list[int]]:
        """Records a line. Every rank calls it.

        Args:
            session: of the training.
            step: that the training has completed.
            scores: 'auc' and 'log_loss' of an evaluation there.

        Returns:
            The counts of all ranks, in the order of `COUNTS`, by the table's name.
        """
        counts = self._sums(session)
        if self._path:
            in_all = [sum(column) for column in zip(*counts.values())] or [0] * len(COUNTS)
            line = [step, f"{scores['auc']:.6f}", f"{scores['log_loss']:.6f}", *in_all]
            with open(self._path, "a") as file:
                file.write("\t".join(map(str, line)) + "\n")
        return counts

    def _sums(self, session: Any) -> dict[str, list[int]]:
        if not self._tables:
            return {}
        session.run(self._restart)
        own = [_counts_of(table, session) for table in self._tables]
        sums = session.run(self._mean, {self._counts: own}) * self._ranks
        return {
            table.op.name: [round(float(count)) for count in row]
            for table, row in zip(self._tables, sums)
        }


def _counts_of(table: collective.DynamicTable, session: Any) -> list[int]:
    statistics = table.statistics(session)
    evicted = [statistics.evicted.get(option, 0) for option in EVICTED_BY]
    return [getattr(statistics, name) for name in COUNTS[: -len(EVICTED_BY)]] + evicted


def lines(counts: dict[str, list[int]]) -> list[str]:
    """Returns a line for each table; evictions that there were none of are left out."""
    described = []
    for name, values in counts.items():
        count = dict(zip(COUNTS, values))
        parts = [f"rows {count['rows']:,}", f"{count['bytes'] / 1e6:,.1f} MB"]
        parts += [f"{count[part]:,} {part}" for part in ("admitted", "refused", "returned")]
        parts += [
            f"{count[option]:,} evicted by {option}" for option in EVICTED_BY if count[option]
        ]
        described.append(f"table {name}: {', '.join(parts)}")
    return described
