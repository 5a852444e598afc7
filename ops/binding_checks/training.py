"""Checks the binding to TensorFlow on real ranks: exchanges and updates of a few tables, compared
with NumPy in float64.

Every rank draws what all ranks look up, so each knows what its shards must become.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from collective.ops import kernel_device, placement
from collective.ops.communication import collectives
from collective.ops.exchange import dispatch, embedding_bag, key_exchange
from collective.ops.gpu.rules import EXAMPLES, Adam, Rule

SHAPES = ((40, 3), (9, 8), (1000, 16))  # of the tables
STEPS, BATCH, MAX_NORM, STARTS_FROM, RATE = 3, 50, 0.7, 0.1, 0.1
# The first example of each.
RULES: dict[str, Rule] = {}
for example in EXAMPLES:
    RULES.setdefault(example.operation, dataclasses.replace(example, rate=RATE))


class Batch(NamedTuple):
    """Holds one rank's lookups in each table: in the first plain rows, in the second weighted
    means, in the third sums.
    """

    ids: list[np.ndarray]
    samples: np.ndarray
    weights: np.ndarray


def batch(seed: int, step: int, rank: int) -> Batch:
    rng = np.random.default_rng([seed, step, rank])
    count = int(rng.integers(1, BATCH))  # each rank has its own batch size
    ids = [np.minimum(rng.zipf(1.3, count) - 1, rows - 1) for rows, _ in SHAPES]
    return Batch(
        ids,
        np.sort(rng.integers(0, 1 + count // 3, count)),
        rng.uniform(0.5, 2, count).astype(np.float32),
    )


def first_values(seed: int) -> list[np.ndarray]:
    return [
        np.random.default_rng([seed, t]).normal(size=shape).astype(np.float32)
        for t, shape in enumerate(SHAPES)
    ]


def factors(t: int) -> np.ndarray:
    """Returns [D], the factors of a result's elements in the loss, which is their weighted sum."""
    return np.linspace(-1, 2, SHAPES[t][1])


def truth(seed: int, rule: Rule, ranks: int) -> list[np.ndarray]:
    """Computes the tables after all steps, in float64."""
    tables = [values.astype(np.float64) for values in first_values(seed)]
    slots = [[_first_slot(rule, table) for _ in range(rule.slots)] for table in tables]
    for step in range(STEPS):
        batches = [batch(seed, step, rank) for rank in range(ranks)]
        for t, table in enumerate(tables):
            gradient, seen = np.zeros_like(table), np.zeros(len(table), bool)
            for one in batches:
                seen[one.ids[t]] = True
                np.add.at(gradient, one.ids[t], _row_gradients(t, one, table))
            seen |= isinstance(rule, Adam) and not rule.lazy
            table[seen], made = _at(rule, step).applied(
                table[seen], gradient[seen] / ranks, [slot[seen] for slot in slots[t]]
            )
            for slot, values in zip(slots[t], made):
                slot[seen] = values
    return tables


def _at(rule: Rule, step: int) -> Rule:
    return dataclasses.replace(rule, step=step + 1) if isinstance(rule, Adam) else rule


def _first_slot(rule: Rule, values: np.ndarray) -> np.ndarray:
    return np.full_like(values[:, :1] if rule.row_wise else values, STARTS_FROM)


def _row_gradients(t: int, one: Batch, table: np.ndarray) -> np.ndarray:
    """Returns [K, D], the gradient of the row that each id has looked up."""
    given = np.tile(factors(t), (len(one.ids[t]), 1))
    if t != 1:
        return given
    shares = one.weights / np.bincount(one.samples, one.weights)[one.samples]
    rows = table[one.ids[t]]
    norms = np.sqrt((rows * rows).sum(1, keepdims=True))
    clipped = MAX_NORM / norms * (given - rows * (rows * given).sum(1, keepdims=True) / norms**2)
    return np.asarray(shares[:, None] * np.where(norms > MAX_NORM, clipped, given))


class Model:
    """Builds the graph of one rank: its shards, exchange and update.

    Args:
        by_owner: whether the owner sums the third table's rows.
    """

    def __init__(self, seed: int, rule: Rule, by_owner: bool):
        self.rule = rule
        ranks = collectives.size()
        own = placement.static(ranks).rows_of(collectives.rank())
        self.ids = [tf.placeholder(tf.int64, [None]) for _ in SHAPES]
        self.samples, self.weights = (
            tf.placeholder(tf.int64, [None]),
            tf.placeholder(tf.float32, [None]),
        )
        self.shards = [
            self._variable(values[own], f"table{t}") for t, values in enumerate(first_values(seed))
        ]
        slots = [
            [
                self._variable(_first_slot(self.rule, values[own]), f"slot{t}.{i}")
                for i in range(self.rule.slots)
            ]
            for t, values in enumerate(first_values(seed))
        ]
        sections = [
            embedding_bag.Section(t, dim, by_owner and t == 2) for t, (_, dim) in enumerate(SHAPES)
        ]
        layout = (sections, [embedding_bag.STATIC] * len(SHAPES), ranks)
        asked = embedding_bag.request(
            self.ids,
            [self.samples] if by_owner else [],
            [],
            [
                embedding_bag.BagMember(
                    t, dim, embedding_bag.SUM if by_owner and t == 2 else embedding_bag.ROWS
                )
                for t, (_, dim) in enumerate(SHAPES)
            ],
            *layout,
            own_samples=[None, self.samples, None if by_owner else self.samples],
            own_weights=[self.weights],
        )
        message, splits = key_exchange.keys_to_owners(
            asked.message, asked.splits, collectives.unique_name("check/keys"), 0
        )
        heard = embedding_bag.respond(message, splits, *layout)
        with embedding_bag.scaled(1 / ranks):
            found = embedding_bag.gather(
                [shard.handle for shard in self.shards],
                heard.keys,
                message,
                splits,
                *layout,
                [shard.shape for shard in self.shards],
                headers=heard.headers,
            )
            received = key_exchange.rows_back(
                found, heard.row_splits, collectives.unique_name("check/rows"), 0
            )
            outs = embedding_bag.pool(
                received,
                asked.positions,
                [*asked.own_samples, *asked.samples],
                [*asked.own_weights, *asked.scales],
                [
                    embedding_bag.BagMember(0, SHAPES[0][1]),
                    embedding_bag.BagMember(1, SHAPES[1][1], embedding_bag.MEAN, True, MAX_NORM),
                    embedding_bag.BagMember(2, SHAPES[2][1], embedding_bag.SUM, by_owner),
                ],
                asked.counts,
            )
            loss = tf.add_n([tf.reduce_sum(out * factors(t)) for t, out in enumerate(outs)])
            gradients = tf.gradients(loss, [shard.handle for shard in self.shards])
        self.numbers = [tf.placeholder(tf.float32, []) for _ in self._numbers(0)]
        self.train = dispatch.operations().collective_sparse_update(
            [shard.handle for shard in self.shards],
            [slot.handle for of in slots for slot in of],
            self.numbers,
            [],
            [g.values for g in gradients],
            [g.indices for g in gradients],
            rule=self.rule.operation,
        )

    def _variable(self, values: np.ndarray, name: str) -> Any:
        return tf.get_variable(name, initializer=values, use_resource=True)

    def _numbers(self, step: int) -> list[float]:
        return _at(self.rule, step).numbers()

    def feeds(self, one: Batch, step: int) -> dict[tf.Tensor, Any]:
        return {
            **dict(zip(self.ids, one.ids)),
            self.samples: one.samples,
            self.weights: one.weights,
            **dict(zip(self.numbers, self._numbers(step))),
        }


def check(seed: int, name: str, by_owner: bool) -> list[str]:
    """Trains with one of RULES; returns the errors on this rank. Every rank must call it."""
    wrong = []
    rank, ranks, rule = collectives.rank(), collectives.size(), RULES[name]
    with tf.Graph().as_default():
        model = Model(seed, rule, by_owner)
        with tf.Session(config=config()) as session:
            session.run(tf.global_variables_initializer())
            for step in range(STEPS):
                session.run(model.train, model.feeds(batch(seed, step, rank), step))
            got = session.run([shard.read_value() for shard in model.shards])
    own = placement.static(ranks).rows_of(rank)
    for t, (mine, whole) in enumerate(zip(got, truth(seed, rule, ranks))):
        difference = float(np.abs(mine - whole[own]).max(initial=0))
        if not difference < 2e-4:
            wrong.append(
                f"rank {rank}: table {t} after {STEPS} steps with {model.rule}: {difference:.1e} "
                "from the truth"
            )
    return wrong


def milliseconds(seed: int, steps: int = 50) -> tuple[float, float]:
    """Times a whole step with Adagrad (the median), and one empty call of the binding.
    Every rank must call it.
    """
    with tf.Graph().as_default():
        model, nothing = Model(seed, RULES["Adagrad"], False), tf.zeros([0], tf.int64)
        empty = embedding_bag.request(
            [nothing],
            [],
            [],
            [embedding_bag.BagMember(0, 1)],
            [embedding_bag.Section(0, 1)],
            [embedding_bag.STATIC],
            1,
        )
        with tf.Session(config=config()) as session:
            session.run(tf.global_variables_initializer())
            feeds = model.feeds(batch(seed, 0, collectives.rank()), 0)
            return _median(lambda: session.run(model.train, feeds), steps), _median(
                lambda: session.run(empty.splits), steps
            )


def _median(run: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times + 3):
        begin = time.perf_counter()
        run()
        taken.append(1e3 * (time.perf_counter() - begin))
    return float(np.median(taken[3:]))


def config() -> tf.ConfigProto:
    """Configures a session as a script does."""
    made = tf.ConfigProto()
    made.gpu_options.allow_growth = True
    made.gpu_options.per_process_gpu_memory_fraction = kernel_device.TENSORFLOW_SHARE
    return made


def report(seed: int) -> Sequence[str]:
    """Says how fast the binding is, and how much memory the kernels use."""
    step, call = milliseconds(seed)
    return [
        f"a step of {len(SHAPES)} small tables: {step:.2f} ms; one call of kernels by "
        f"TensorFlow: {call:.2f} ms",
        dispatch.operations().memory(),
    ]
