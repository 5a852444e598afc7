"""Checks CollectiveSpreadRows of pooled sections on a device: the transpose of sums by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from bagged import CLIPPED, DIMS, MIXED, PLAIN, ROWS, Bagged, Section, near

from collective.ops import native_library
from collective.ops.exchange import dispatch
from tests.gpu_double import driver


class Spread(Bagged):
    """Builds the operation for such messages; some keys have no row."""

    def __init__(self, sections: tuple[Section, ...], scale: float, **shape: Any):
        super().__init__(sections, **shape)
        rng = np.random.default_rng(8)
        self.scale = scale
        self.numbers = [
            [rng.integers(0, ROWS + 1, len(one.rows)) for one in of_rank] for of_rank in self.sent
        ]
        self.inverse = [
            tf.constant(
                np.concatenate([[], *(self.numbers[r][s] for r, s in self.pieces(t))]), tf.int32
            )
            for t in range(len(DIMS))
        ]

    def spread(self, operations: Any = None) -> tf.Tensor:
        return (operations or dispatch.operations()).collective_spread_rows(
            [tf.constant(one) for one in self.values],
            self.inverse,
            [table.handle for table in self.tables],
            self.rows,
            self.message,
            self.splits,
            [self.headers] if operations is None else [],
            scale=self.scale,
            **self.attributes,
            **self.more,
        )

    def wanted(self) -> np.ndarray:
        """Computes the rows of bags in float64; nothing is clipped."""
        made = []
        for sent, numbers in zip(self.sent, self.numbers):
            for section, one, of in zip(self.sections, sent, numbers):
                rows = np.pad(self.values[section.table].astype(np.float64), ((0, 1), (0, 0)))[of]
                pooled = np.zeros((len(one.lengths), DIMS[section.table]))
                np.add.at(pooled, one.bags, one.weights[:, None] * rows)
                made.append(self.scale * pooled.reshape(-1))
        return np.concatenate(made)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("sections", [PLAIN, MIXED, CLIPPED])
@pytest.mark.usefixtures("bound")
def test_rows_are_spread(stand_in: driver.StandIn, sections: tuple[Section, ...], scale: float):
    """As NumPy and the CPU's operation do it, where nothing is done before somebody waits."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Spread(sections, scale)
        on_cpu, flat = made.spread(native_library.library()), made.spread()
        session.run(tf.global_variables_initializer())
        stand_in.reset()
        stand_in.delays = True
        got = session.run(flat)
        assert not stand_in.queued
        near([got, got], [made.wanted(), session.run(on_cpu)])
    unpooled = ["spread_rows"] if not all(one.pooled for one in sections) else []
    pooled = ["pool_rows_plain" if sections == PLAIN else "pool_rows"]
    scales = ["scale_values"] if scale != 1 else []
    assert stand_in.launches == [*unpooled, "bag_offsets", *pooled, *scales]
    assert stand_in.calls.count("copy_to_device") == 1 and "copy_to_host" not in stand_in.calls


@pytest.mark.usefixtures("bound", "stand_in")
def test_more_bags_than_a_block_has_threads():
    with tf.Graph().as_default(), tf.Session() as session:
        made = Spread((Section(0, weighted=True), Section(1)), 0.3, ranks=1, most=9000, keys=1)
        session.run(tf.global_variables_initializer())
        near([session.run(made.spread())], [made.wanted()])


@pytest.mark.usefixtures("bound")
def test_no_bags(stand_in: driver.StandIn):
    with tf.Graph().as_default(), tf.Session() as session:
        made = Spread(MIXED, 0.3, most=0)
        flat = made.spread()
        session.run(tf.global_variables_initializer())
        stand_in.reset()
        assert session.run(flat).shape == (0,)
    assert stand_in.launches == []


@pytest.mark.parametrize("bound", ["double"], indirect=True)
@pytest.mark.usefixtures("bound")
def test_each_call_of_the_driver_may_fail(stand_in: driver.StandIn):
    """Then the operation fails, nothing of it is under way after it, and the next one works."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = Spread(MIXED, 0.3)
        flat = made.spread()
        session.run(tf.global_variables_initializer())
        session.run(flat)
        stand_in.reset()
        session.run(flat)
        names = list(stand_in.calls)
        assert len(names) > 4
        for number, name in enumerate(names, 1):
            stand_in.reset()
            stand_in.delays, stand_in.fails_at = True, number
            with pytest.raises(tf.errors.InternalError, match="error 719 from cu"):
                session.run(flat)
            if name != "wait_for_stream":
                assert not stand_in.queued
            stand_in.reset()
            near([session.run(flat)], [made.wanted()])
