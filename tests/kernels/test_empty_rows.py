"""Memory for rows is as large as they are, stays where it is, and is given back."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from collective.tables.rows import initializers

MB = 1 << 20


def anonymous():
    """Returns the bytes of memory that this process has taken, files that are mapped excepted."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def test_it_takes_what_the_rows_need():
    """TensorFlow's allocator takes 4 MB more for these 72."""
    rows, dim, block = 72 * MB // 128, 32, 1 << 13
    with tf.Graph().as_default(), tf.Session() as session:
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[None, dim], shared_name="rows")
        assign, small = (
            tf.raw_ops.AssignVariableOp(
                resource=handle, value=initializers.empty((count, dim), tf.float32)
            )
            for count in (rows, block)
        )
        destroy = tf.raw_ops.DestroyResourceOp(resource=handle)
        index, value = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [])
        update = tf.raw_ops.ResourceScatterUpdate(resource=handle, indices=index, updates=value)
        read = tf.raw_ops.ResourceGather(resource=handle, indices=index, dtype=tf.float32)

        def fill(count):
            for first in range(0, count, block):
                session.run(update, {index: np.arange(first, first + block), value: 1.5})
            return session.run(read, {index: [2, count - 1]})

        session.run(small)
        fill(block)
        session.run(destroy)
        before = anonymous()
        session.run(assign)
        np.testing.assert_array_equal(fill(rows), np.full([2, dim], 1.5))
        taken = anonymous() - before
        assert 72 * MB <= taken < 74 * MB, taken / MB
        session.run(destroy)
        assert anonymous() - before < 2 * MB


def test_memory_that_there_is_not():
    with tf.Graph().as_default(), tf.Session() as session:
        rows = initializers.empty((1 << 44, 1 << 10), tf.float32)
        with pytest.raises(tf.errors.ResourceExhaustedError, match="there is no memory for"):
            session.run(rows.op)
