"""Trains a wide and deep network on 64-bit hashes by a session, in tables of bounded memory.

    COLLECTIVE_STRATEGY=hb collective launch -np 2 modelzoo/hashed_ids/train.py

Without the launcher it is one rank. The model is that of Cheng et al., Wide & Deep Learning for
Recommender Systems (2016): a deep network takes the vectors of ids, and the wide part sums a number
of each id and of each cross of two columns. Ids and crosses are hashes of 64 bits, with a dynamic
table for each kind. New ones never stop coming: a table admits those that come often, which a Bloom
filter counts in fixed memory, evicts those that don't come any more, and has a capacity.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder and common/ lie there

import tensorflow.compat.v1 as tf

import collective
from common import click_session, layers, training_course
from common.click_log import CATEGORICAL
from common.click_model import ClickModel, Features, first_rows, levels
from common.click_options import ClickOptions, Defaults
from common.click_source import Source, load
from common.command_line import TrainingParser, whole_number
from hashed_ids.hashed_clicks import CROSSES, HashedClicks
from hashed_ids.keys import crossed

DEEP = (64, 32)
LIMITS = {"filter_freq": 3, "steps_to_live": 200, "capacity": 50_000}
MOST_COUNTED = 255  # by a counter of 8 bits
FALSE_POSITIVES = 0.1  # A key that comes too early costs a row, no more.
EVICT_EVERY = 20  # steps, where rows are evicted for their age


def add_options(parser: TrainingParser) -> None:
    helps = {
        "filter_freq": "give a key its row when it comes for this time; 0 or 1: at once",
        "steps_to_live": "evict rows that training didn't look up for so many steps; 0: never",
        "capacity": "how many rows each table has on all ranks together; 0: any number",
    }
    for name, text in helps.items():
        option = f"--{name.replace('_', '-')}"
        most = MOST_COUNTED if name == "filter_freq" else None
        parser.add_argument(option, type=whole_number(0, most), default=LIMITS[name], help=text)
    parser.add_argument(
        "--filter-keys",
        type=whole_number(0),
        default=3_000_000,
        help="count keys without rows in a Bloom filter that is made for so many of a table; 0: "
        "one by one, in memory that grows with them",
    )
    parser.add_argument(
        "--unbounded", action="store_true", help="admit every key, and evict no row"
    )
    training_course.add_options(parser)


def check_options(parser: TrainingParser, parsed: argparse.Namespace) -> None:
    changed = [name for name, value in LIMITS.items() if getattr(parsed, name) not in (value, 0)]
    if parsed.unbounded and changed:
        option = f"--{changed[0].replace('_', '-')}"
        parser.error(
            f"--unbounded and {option} {getattr(parsed, changed[0])} contradict each other"
        )
    if parsed.buckets != parser.get_default("buckets"):
        parser.error("--buckets is for tables of a fixed number of rows: these have --capacity")
    if parsed.mode != "train" and (parsed.course or parsed.evaluate_steps):
        parser.error("--course and --evaluate-steps are for --mode train")


class HashedIds(ClickModel):
    defaults = Defaults(
        "Trains a wide and deep network on 64-bit hashes, evaluates it, exports it or predicts "
        "with it.",
        learning_rates={"adagrad": 1.0, "adamasync": 0.01},
        optimizer="adamasync",
        epochs=1,
        rows=500_000,
        add=add_options,
        check=check_options,
    )

    @classmethod
    def source(cls, options: ClickOptions, fail: Callable[[str], Any]) -> Source:
        return load(options.data, options.buckets, lambda: HashedClicks(options.rows), fail)

    def logits(self, features: Features) -> tf.Tensor:
        ids = features["categorical"]  # [B, 26]
        # The same number in two columns is two ids.
        keys = crossed(tf.range(CATEGORICAL, dtype=tf.int64), ids)
        rows = self._rows("ids", keys, 1 + self.options.dim)
        pairs = [tf.gather(ids, columns, axis=1) for columns in zip(*CROSSES)]
        numbers = self._rows("crosses", crossed(tf.range(len(CROSSES), dtype=tf.int64), *pairs), 1)
        wide = tf.reduce_sum(rows[:, :, 0], axis=1) + tf.reduce_sum(numbers[:, :, 0], axis=1)
        vectors = tf.reshape(rows[:, :, 1:], [-1, CATEGORICAL * self.options.dim])
        deep = layers.network("deep", tf.concat([levels(features), vectors], axis=1), DEEP)
        return wide + tf.squeeze(layers.dense("logit", deep, 1), axis=1)

    def course(self, rank: int, ranks: int) -> training_course.TrainingCourse:
        own = self.options.own
        return training_course.TrainingCourse(own.evaluate_steps, own.course, rank, ranks)

    def _rows(self, name: str, keys: tf.Tensor, dim: int) -> tf.Tensor:
        """Looks keys [B, K] up in a dynamic table: [B, K, dim]."""
        with self.embedding_scope():
            table = collective.get_embedding_variable(
                name, dim, initializer=first_rows(), ev_option=self._policy()
            )
        return tf.nn.embedding_lookup(table, keys)

    def _policy(self) -> collective.TablePolicy | None:
        own = self.options.own
        limits: dict[str, Any] = {n: getattr(own, n) for n in LIMITS if getattr(own, n)}
        if own.unbounded or not limits:
            return None
        if "steps_to_live" in limits:
            limits["evict"] = collective.every_steps(EVICT_EVERY)
        policy = collective.TablePolicy(**limits)
        if not policy.counts_keys or not own.filter_keys:
            return policy
        return dataclasses.replace(
            policy,
            max_element_size=own.filter_keys,
            false_positive_probability=FALSE_POSITIVES,
            counter_type="uint8",
        )


if __name__ == "__main__":
    sys.exit(click_session.main(HashedIds))
