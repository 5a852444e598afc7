"""Trains by each optimizer, and prints which operations on tables or slots TensorFlow could not
place on a GPU.
"""

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import kernels

from collective import CollectiveStrategy, train

OPTIMIZERS = (
    tf.train.GradientDescentOptimizer(0.1),
    tf.train.MomentumOptimizer(0.1, 0.9),
    tf.train.AdagradOptimizer(0.1),
    tf.train.AdamOptimizer(0.1),
    tf.train.FtrlOptimizer(0.1),
    tf.train.RMSPropOptimizer(0.1),
    tf.train.AdadeltaOptimizer(0.1),
    # One number a row, an integer a row, and one for the whole table.
    train.RowWiseAdagradOptimizer(0.1),
    lambda: train.AdagradDecayOptimizer(0.1, tf.train.get_or_create_global_step()),
    train.AdamAsyncOptimizer(0.1),
)


def has_gpu_kernel(op):
    def fits(kernel):
        return all(
            set(values(op, c.name)) <= set(c.allowed_values.list.type) for c in kernel.constraint
        )

    return any(
        fits(kernel)
        for kernel in kernels.get_registered_kernels_for_op(op.type).kernel
        if kernel.device_type in ("GPU", "DEFAULT")
    )


def values(op, name):
    found = op.get_attr(name)
    return [
        tf.as_dtype(x).as_datatype_enum
        for x in (found if isinstance(found, (list, tuple)) else [found])
    ]


def misplaced(strategy, optimizer):
    """Returns the operations that can't be on a GPU, of a graph that is trained, saved, read as a
    whole.
    """
    with strategy.scope(plan="quiet"), tf.Graph().as_default() as graph:
        with strategy.embedding_scope():
            plain, pooled = (tf.get_variable(name, [10, 3]) for name in "ab")
            dynamic = tf.get_variable("c", [None, 3])
        ids = tf.placeholder(tf.int64, [None])
        at = tf.stack([tf.range(tf.size(ids, out_type=tf.int64))] * 2, 1)
        rows = tf.nn.embedding_lookup_sparse(
            pooled, tf.SparseTensor(at, ids, [3, 3]), None, combiner="mean"
        )
        loss = (
            tf.reduce_sum(tf.nn.embedding_lookup(plain, ids))
            + tf.reduce_sum(rows)
            + tf.nn.l2_loss(plain)
        )
        loss += tf.reduce_sum(tf.nn.embedding_lookup(dynamic, ids))
        if callable(optimizer):
            optimizer = optimizer()
        update = optimizer.minimize(loss, global_step=tf.train.get_or_create_global_step())
        saver = tf.train.Saver()
        with tf.train.MonitoredTrainingSession("") as session:
            for _ in range(2):
                session.run(update, {ids: [1, 2, 3]})
            assert np.isfinite(session.run(plain)).all()
            assert dynamic.local_count(session)
        assert saver.saver_def
        sharded = {v.handle.op for v in tf.global_variables() if v.shape.rank == 2}
        sharded |= {
            op
            for op in graph.get_operations()
            if op.type == "IdentityN" and op.inputs[0].op in sharded
        }
        users = [
            op
            for op in graph.get_operations()
            if op in sharded or any(x.op in sharded for x in op.inputs)
        ]
        assert len(users) > 8
        return [
            f"{op.type} {op.name} {op.device}"
            for op in users
            if not has_gpu_kernel(op) or "CPU" in op.device.upper()
        ]


if __name__ == "__main__":
    made = CollectiveStrategy()
    found = [line for one in OPTIMIZERS for line in misplaced(made, one)]
    print(
        "\n".join(found) or f"rank {made.rank()}: all operations on tables have kernels for GPUs",
        flush=True,
    )
