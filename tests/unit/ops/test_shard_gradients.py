"""Rows that come several times are summed up, in graphs and without one."""

import numpy as np
import pytest
import tensorflow as tf2

from collective.ops.exchange import shard_gradients


@pytest.mark.parametrize("wrapped", [lambda work: work, tf2.function], ids=["eager", "function"])
def test_rows_are_summed_up_in_the_order_of_appearance(wrapped):
    values = tf2.constant([[1.0, 2], [10, 20], [100, 200]])
    sums, rows = wrapped(shard_gradients.summed)(values, tf2.constant([4, 1, 4], tf2.int64))
    np.testing.assert_array_equal(rows, [4, 1])
    np.testing.assert_array_equal(sums, [[101, 202], [10, 20]])
